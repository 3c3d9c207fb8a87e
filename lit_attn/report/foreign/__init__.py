"""Runs of other programs: readers, checks, the directions of metrics, and verdicts."""
