"""A cell's folder, lock, processes and records: shared by training, runner and report."""
