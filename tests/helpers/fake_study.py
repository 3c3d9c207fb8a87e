"""Invented records of a study for the tests of the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_attn.cells.decisions import Seal
from lit_attn.cells.records import Exit, Plan, PlannedCell, PlannedVariant, Result, Spread
from lit_attn.report import write_reports
from lit_attn.report.records.read import read_studies
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.tasks.metrics import DEFAULT_METRIC

EFFECTS = {"standard": 0.0, "belief": 0.004, "belief2": 0.02}
EPOCHS = 8


def write_study(
    root: Path,
    name: str = "fake",
    variants: dict[str, float] | None = None,
    seeds: int = 5,
    title: str = "A study that never ran",
    skip: tuple[tuple[str, int], ...] = (),
    failures: dict[tuple[str, int], str] | None = None,
    published: dict[str, tuple[float, float | None]] | None = None,
    **plan: object,
) -> Path:
    """Write a study below `root`, without the cells in `skip`; those in `failures` have failed."""
    variants = EFFECTS if variants is None else variants
    names = list(variants)
    cells = [
        PlannedCell(variant=v, seed=s, identity=f"{i:02d}{s:08d}", path=f"v{i}/{s}-{i:02d}{s:08d}")
        for i, v in enumerate(names)
        for s in range(seeds)
    ]
    settings = {
        "study": name,
        "title": title,
        "baseline": names[0],
        "metric": DEFAULT_METRIC,
        "variants": [PlannedVariant(name=v, published=(published or {}).get(v)) for v in names],
        "seeds": list(range(seeds)),
        "cells": cells,
    } | plan
    folder = root / name
    Plan.model_validate(settings).write(folder / "plan.json")
    for cell in cells:
        place = folder / cell.path
        key = (cell.variant, cell.seed)
        if failures and key in failures:
            end = Exit(failure=failures[key], returncode=1, message="x", finished="2026-01-01")
            end.write(place / "attempts" / "1" / "exit.json")
        elif key not in skip:
            accuracy = accuracy_of(variants[cell.variant], cell.seed, cell.variant)
            result(cell, accuracy).write(place / "result.json")
            (place / "metrics.csv").write_text(curve(accuracy, cell.seed))
    return folder


def read(root: Path, **study: object) -> StudyRecord:
    """Write a study with `write_study` and read it again."""
    write_study(root, **study)
    return next(read_studies(root))


def change_results(
    folder: Path, change: Callable[[PlannedCell], dict[str, Any] | None]
) -> StudyRecord:
    """Write the results of a study with the values of `change`, and read it; None leaves a cell."""
    for cell in Plan.load(folder / "plan.json").cells:
        values = change(cell)
        if values is not None:
            result(cell, 0.5, **values).write(folder / cell.path / "result.json")
    return next(read_studies(folder.parent, [folder.name]))


def accuracy_of(effect: float, seed: int, variant: str) -> float:
    """Return the level of the seed plus the effect of the variant plus a little noise."""
    level = np.random.default_rng(seed).normal(0.72, 0.005)
    noise = np.random.default_rng([seed, *variant.encode()]).normal(0, 0.002)
    return float(level + effect + noise)


def result(cell: PlannedCell, accuracy: float, **changes: object) -> Result:
    """Return the result of a cell; later variants in the plan cost more."""
    place = int(cell.identity[:2])
    values = {
        "study": "fake",
        "variant": cell.variant,
        "seed": cell.seed,
        "identity": cell.identity,
        "metrics": {"test/accuracy": accuracy, "test/loss": 1 - accuracy},
        "selected_epoch": EPOCHS - 1,
        "steps": 100 * EPOCHS,
        "epochs": EPOCHS,
        "parameters": 3_375_076,
        "flops": 412_345_678 + 9_000_000 * place,
        "ffn_width": 384,
        "step_time": Spread(median=0.0123 + 0.001 * place + cell.seed * 1e-4, iqr=0.001, count=390),
        "peak_memory": 812_000_000,
        "wall_time": 61.5,
        "device": "CPU",
        "attempts": 1,
        "code": "c0de",
        "data": "da7a",
        "versions": {"torch": "2.15.0"},
        "finished": "2026-01-01T00:00:00+00:00",
    } | changes
    return Result.model_validate(values)


def curve(accuracy: float, seed: int) -> str:
    """Return the content of a metrics.csv whose last value is `accuracy`."""
    wobble = 0.01 * np.random.default_rng(seed).normal(size=EPOCHS)
    remaining = 1 - np.arange(1, EPOCHS + 1) / EPOCHS
    values = accuracy - 0.3 * remaining**2 + wobble * remaining
    rows = [f"{100 * e},{e},test/accuracy,{value}" for e, value in enumerate(values)]
    return "\n".join(["step,epoch,name,value", *rows, ""])


def report(root: Path, name: str = "fake") -> Path:
    """Write the reports of `root`/runs to `root`/reports and return the folder of a study."""
    write_reports(root / "runs", root / "reports")
    return root / "reports" / name


def rows(folder: Path) -> pd.DataFrame:
    """Return the table.csv of a report with the variants as index."""
    return pd.read_csv(folder / "table.csv").set_index("variant")


def make_seal(**changes: object) -> Seal:
    """Return the seal of a plan before its first result."""
    decisions = {
        "time": "2026-01-02T03:04:05+00:00",
        "results": 0,
        "hash": "5ea1",
        "variants": {"standard": "000", "ours": "010"},
        "baseline": "standard",
        "seeds": [0],
        "metric": DEFAULT_METRIC,
        "match": ["parameters"],
        "tune": {},
        "exclude": [],
    }
    return Seal.model_validate(decisions | changes)
