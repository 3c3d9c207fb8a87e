"""Studies with `stop: futility`, run with the decisions of the runner and without processes."""

import argparse
from collections.abc import Callable
from pathlib import Path

from helpers import fake_cells, studies
from helpers.fake_cells import measure, result
from lit_attn.ablate.commands.arguments import StudyOptions, add_study_arguments
from lit_attn.ablate.commands.execution import run_selected
from lit_attn.ablate.commands.options import expand_studies, read_options
from lit_attn.ablate.launch import Launcher
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import Job, Matrix
from lit_attn.ablate.stopping import update_endings
from lit_attn.cells.decisions import Ending, Endings

DULL = "cells: {base: {}, dull: {optimizer.lr: 2}}"


def write_study(folder: Path, body: str = DULL, seeds: str = "10") -> Path:
    """Write a study with the rule, whose variant `dull` it ends."""
    path = studies.write(folder, f"baseline: base\nstop: futility\n{body}")
    path.write_text(path.read_text().replace("    seeds: 2\n", f"    seeds: {seeds}\n"))
    return path


def make_options(folder: Path, *arguments: str) -> StudyOptions:
    """Return the options of a run of the study in `folder`."""
    parser = argparse.ArgumentParser()
    add_study_arguments(parser)
    words = [str(folder / "ablations.yaml"), "--out", str(folder / "runs"), *arguments]
    return read_options(parser.parse_args(words))


def expand(folder: Path) -> list[Matrix]:
    return expand_studies(make_options(folder))


def finish(job: Job) -> None:
    """Give a cell a result."""
    job.folder.mkdir(parents=True, exist_ok=True)
    result(job.cell, measure(job.cell)).write(job.folder / "result.json")


def run(folder: Path, *arguments: str, end: Callable[[Job], None] = finish) -> list[list[str]]:
    """Run the missing cells one after another, as the runner does with one slot.

    Return the variants that had a cell in each start, as STUDY/VARIANT.
    """
    options = make_options(folder, *arguments)
    starts = []

    def start(missing: list[Job]) -> Summary:
        trained = []
        ended: dict[Path, Ending] = {}
        seed = None
        for job in missing:
            if job.cell.seed != seed:
                # The decisions of a run are those after the last cell of a seed.
                ended = update_endings(job.folder.parents[1])
                seed = job.cell.seed
            if job.folder not in ended:
                end(job)
                trained.append(job.variant)
        starts.append(list(dict.fromkeys(trained)))
        return Summary()

    run_selected(expand_studies(options), options, Launcher(fake_cells.TARGET), start, None)
    return starts


def read_endings(folder: Path, study: str) -> dict[str, Ending]:
    """Return the recorded endings of a study by variant."""
    recorded = Endings.read(folder / "runs" / study / "endings.json")
    return {} if recorded is None else {entry.variant: entry for entry in recorded.entries}


def count_results(folder: Path, study: str, variant: str) -> int:
    return len(list((folder / "runs" / study / variant).glob("*/result.json")))
