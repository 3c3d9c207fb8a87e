"""Cells as SLURM jobs.

`submit` sends the missing cells of studies to SLURM as job arrays, `limits` checks before that what
the cluster allows, `job` is what a job runs, `queue` finds the job of every cell again, and
`follow` waits for the ends of the cells.
"""
