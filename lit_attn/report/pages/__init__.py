"""Pages: HTML with tables and figures, and the index of all studies."""
