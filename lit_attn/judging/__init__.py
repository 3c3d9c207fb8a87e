"""Verdicts about runs of any program: tables, trackers, streams of ideas, targets and power laws.

`lit_attn.judge`, `lit_attn.compare`, `lit_attn.find_laws` and `lit_attn.read_runs` are the door for
Python, and `lit-attn judge`, `lit-attn laws` and `lit-attn report --csv` are those of the command
line. Nothing here imports PyTorch. The folder cannot be called `judge`: a submodule would hide the
function `lit_attn.judge`.

`table.py` reads runs, `prepare.py` makes a study of them, and `runs.py` judges it; the verdicts of
a study stand in the core (lit_attn.report.verdicts). `stream*.py` judge ideas one after another,
`target.py` compares with a value, `budget.py` plans within a budget, and `laws.py` fits laws.
"""
