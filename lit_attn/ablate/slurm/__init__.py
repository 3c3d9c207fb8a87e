"""Cells as jobs of SLURM: submitted, found again, followed, cancelled."""
