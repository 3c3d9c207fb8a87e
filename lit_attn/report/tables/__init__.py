"""Tables: rows of printed cells, their columns and captions, and the formats of the files."""
