"""The five papers: their tables, figures and claims as printed, and the cells that they need.

`lit-attn run --paper NAME` and `lit-attn report --paper NAME` are the door. `source.py` reads a
file of `experiments/papers`, `runs.py` chooses the cells, `study_numbers.py` has the published
numbers of a study, and `page.py` writes the page.
"""
