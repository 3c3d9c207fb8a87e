"""Invented results for the tables of a paper, and the cells that its page then shows."""

from collections.abc import Callable
from pathlib import Path

from helpers.fake_cells import result
from helpers.paths import EXPERIMENTS
from lit_attn.cells.records import Spread
from lit_attn.papers.claims import Verdict, judge_claims
from lit_attn.papers.page import make_tables
from lit_attn.papers.published import make_entries, read_records
from lit_attn.papers.runs import expand_paper
from lit_attn.papers.source import read_paper
from lit_attn.report.tables.formats import Table

FOLDER = EXPERIMENTS / "papers"
NAMES = ("attentionx", "belief2", "beliefformer", "dcmha", "mgk")
CLOCK = "step,seconds\n10,5.0\n20,11.0\n"


def run_invented(
    runs: Path,
    paper: str,
    numbers: list[str],
    value: Callable[[str, int], float],
    size: str = "",
    seeds: int | None = 5,
    smoke: bool = False,
) -> None:
    """Write a result with the metric `value(variant, seed)` for every cell of some tables.

    Without a number of `seeds` they are those of the studies.
    """
    source = read_paper(paper, size, FOLDER)
    chosen_seeds = None if seeds is None else tuple(range(seeds))
    for matrix in expand_paper(source, numbers, runs, seeds=chosen_seeds, smoke=smoke):
        matrix.write_plan()
        name = matrix.plan().metric.name
        for job in matrix.jobs:
            number = value(job.variant, job.seed)
            invented = result(job.cell).model_copy(
                update={
                    "metrics": {name: number, "test/top5": 0.9},
                    "parameters": 24_000_856 if "star" in job.variant else 22_226_776,
                    "step_time": Spread(median=0.5, iqr=0.0, count=1),
                    "evaluation_time": Spread(median=2.0, iqr=0.0, count=1),
                    "steps": 20,
                    "epochs": 2,
                }
            )
            invented.write(job.folder / "result.json")
            rows = [f"10,0,{name},{number / 2}", f"20,1,{name},{number}", "20,1,train/loss,1.5"]
            rows += [f"10,0,test/top5,{0.25}"]
            (job.folder / "metrics.csv").write_text("\n".join(["step,epoch,name,value", *rows, ""]))
            (job.folder / "clock.csv").write_text(CLOCK)


def entries(runs: Path, paper: str, number: str, size: str = "") -> dict[tuple[str, str], str]:
    source = read_paper(paper, size, FOLDER)
    item = source.paper.tables[number]
    records = read_records(source, [item], runs)
    return {
        (entry.row, entry.column): entry.ours
        for line in make_entries(source, item, records)
        for entry in line
    }


def judge(runs: Path, paper: str, *numbers: str, size: str = "") -> list[Verdict]:
    """Return the verdicts of the claims of some tables and figures."""
    source = read_paper(paper, size, FOLDER)
    items = source.items(list(numbers))
    return judge_claims(source, items, read_records(source, items.values(), runs))


def draw(runs: Path, paper: str, number: str, size: str = "") -> list[Table]:
    """Return the tables with the title "T" of a printed table and its readings."""
    source = read_paper(paper, size, FOLDER)
    item = source.paper.tables[number]
    return make_tables(source, item, read_records(source, [item], runs), "T")
