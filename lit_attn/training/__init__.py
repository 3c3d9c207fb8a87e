"""The training engine: from a cell's configuration to its result."""
