"""Statistics: arrays in, numbers out. Nothing here reads a record."""
