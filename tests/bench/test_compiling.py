"""Graphs and seconds of torch.compile, for a whole model and block by block."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tables import read_table

from lit_attn.bench import compiling
from lit_attn.bench.__main__ import main


@pytest.mark.slow
def test_blocks_have_one_graph_at_any_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with = torch.compile

    def compile_without_code(function: Any, **options: Any) -> Any:
        return compile_with(function, backend="eager")

    # The number of graphs is that of any backend.
    monkeypatch.setattr(torch, "compile", compile_without_code)
    command = (
        "compiling --presets standard --rounds 2 --device cpu --depth 1 3"
        " --dim 8 --heads 2 --tokens 4 --batch 2 --vocabulary 8"
    )
    assert main([*command.split(), "--out", str(tmp_path)]) == 0
    rows = read_table(tmp_path / "compiling-cpu.csv")
    assert [(row["depth"], row["compiled"]) for row in rows] == [
        ("1", "network"),
        ("1", "blocks"),
        ("3", "network"),
        ("3", "blocks"),
    ]
    assert [row["graphs"] for row in rows] == ["1"] * 4
    assert compiling.WAYS == ("network", "blocks")
