"""Cells as SLURM jobs: submission, search, display and cancellation."""
