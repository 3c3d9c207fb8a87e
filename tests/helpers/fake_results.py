"""Large studies with invented results, to measure dry run, status and resume.

`PYTHONPATH=tests:. python -m helpers.fake_results FOLDER CELLS` writes a study and its results.
"""

import sys
from pathlib import Path

from helpers import studies
from helpers.fake_cells import result
from lit_attn.ablate.plan import Matrix, expand

SEEDS = 50


def write_results(folder: Path, cells: int) -> Matrix:
    """Write a study of about `cells` cells to `folder`, and a result of every cell."""
    variants = max(1, cells // SEEDS)
    rates = ", ".join(str(number + 1) for number in range(variants))
    body = f"seeds: {SEEDS}\nbaseline: '1'\naxes: {{optimizer.lr: [{rates}]}}"
    path = studies.write(folder, body)
    path.write_text(path.read_text().replace("    seeds: 2\n", ""))
    matrix = expand(studies.read_studies(path)["tiny"], folder / "runs")
    for job in matrix.jobs:
        attempt = job.folder / "attempts" / "1"
        attempt.mkdir(parents=True)
        (attempt / "log.txt").write_text("threads 1\n")
        (job.folder / "config.yaml").write_text("study: tiny\n")
        # Written directly, because Record.write waits for the disk.
        (job.folder / "result.json").write_text(result(job.cell).model_dump_json(indent=2))
    matrix.write_plan()
    return matrix


if __name__ == "__main__":
    write_results(Path(sys.argv[1]), int(sys.argv[2]))
