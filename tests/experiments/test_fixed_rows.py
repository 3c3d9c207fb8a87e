"""Fixed rows of the probes: drawn once, kept for later cells, and read once in each pass."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from pydantic import ValidationError

from lit_attn.data.module import numpy_generator
from lit_attn.data.sets import digest
from lit_attn.schema.plugins import load_parts

load_parts([ROOT / "experiments" / "probes" / "recall.py"])
probes = importlib.import_module("probes")
recall = importlib.import_module("recall")

CPU = torch.device("cpu")


def fixed_rows(root: Path, **keys: Any) -> Any:
    """Return a recall of 12 fixed rows, kept below `root`."""
    chosen = {"ids": 16, "length": 16, "rows": 12, "batch_size": 4, "fill": "zeros", **keys}
    return recall.RecallConfig(**chosen, root=root)


def test_fixed_rows_are_read_once_in_each_pass(tmp_path: Path) -> None:
    chosen = fixed_rows(tmp_path)
    passes = []
    for seed in (0, 1):
        data = chosen.build(seed, CPU)
        for number in range(2):
            steps = range(3 * number, 3 * number + 3)
            passes.append([tuple(row) for step in steps for row in data.batch(step)[0].tolist()])
    # All seeds have the same rows, in orders of their own.
    assert len({tuple(sorted(rows)) for rows in passes}) == 1
    assert len({tuple(rows) for rows in passes}) == 4
    fixed = chosen.build(0, CPU)
    assert fixed.fingerprint() == chosen.build(1, CPU).fingerprint()
    more = chosen.model_copy(update={"rows": 16})
    assert fixed.fingerprint() != more.build(0, CPU).fingerprint()
    # Eight tokens of pairs and four queries leave four zeros.
    assert all(row.count(0) == 4 for row in passes[0])
    with pytest.raises(ValidationError, match="rows: 3 fill no batch of 4"):
        fixed_rows(tmp_path, rows=3)


def test_the_first_cell_draws_fixed_rows_and_later_cells_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = fixed_rows(tmp_path)
    tokens, targets = chosen.draw(numpy_generator(0, "rows", 0), 12, 16, True)
    first = chosen.build(0, CPU)
    other_batches = chosen.model_copy(update={"batch_size": 6, "longer": 32}).build(0, CPU)
    # Other keys of the probe, or other code, draw other rows.
    fixed_rows(tmp_path, fill="random").build(0, CPU)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    monkeypatch.setattr(probes.inspect, "getfile", lambda member: __file__)
    chosen.build(0, CPU)
    assert len(list(tmp_path.glob("*.npz"))) == 3
    monkeypatch.undo()

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the rows are drawn again")

    monkeypatch.setattr(probes, "draw_rows", refuse)
    second = chosen.build(1, CPU)
    for module in (first, other_batches, second):
        np.testing.assert_array_equal(module.fixed[0], tokens)
        np.testing.assert_array_equal(module.fixed[1], targets)
    # The kept rows are narrow; the batches and the fingerprint are those of int64.
    assert second.fixed[0].dtype == np.int8
    assert [array.dtype for array in second.batch(0)] == [torch.int64, torch.int64]
    evaluated = [array for arrays in first.sequences.values() for array in arrays]
    assert second.fingerprint() == digest([tokens, targets, *evaluated])
    assert chosen.input_paths() == []
