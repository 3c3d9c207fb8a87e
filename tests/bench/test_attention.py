"""The attention benchmark: blocks of equal size, and ratios."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.tables import read_table

from lit_attn.attention.spec import PRESETS
from lit_attn.bench import attention, measure
from lit_attn.bench.__main__ import main
from lit_attn.bench.measure import Setup
from lit_attn.models.factory import count

SHAPE = attention.Shape(batch=2, tokens=9, dim=24, heads=4)
SMALL = ["--batch", "2", "--tokens", "9", "--dim", "24", "--heads", "4"]
SMALL += ["--modes", "eager", "--rounds", "2"]


# Mechanisms with more parameters than the baseline, with fewer, and with the same number.
@pytest.mark.parametrize("name", ["belief2", "mgk", "dcmha-all", "mla", "xsa"])
def test_blocks_have_matched_parameters(name: str) -> None:
    shape = attention.Shape()
    target = count(
        attention.build_block(attention.BASELINE, shape, attention.FFN_RATIO * shape.dim)
    )
    width = attention.match_width(name, shape, target)
    matched = count(attention.build_block(name, shape, width))
    assert abs(matched - target) <= (2 * shape.dim + 1) / 2


def test_rows_contain_ratios_and_memory() -> None:
    rows = attention.run(["belief", "mgk"], SHAPE, ["eager"], Setup("cpu", torch.float32, rounds=2))
    baseline, belief, mgk = rows
    assert [row.name for row in rows] == [attention.BASELINE, "belief", "mgk"]
    assert baseline.ratio == (1, 0)
    assert baseline.peak_ratio == 1
    assert belief.parameters == baseline.parameters
    assert mgk.peak_ratio == pytest.approx(mgk.peak / baseline.peak)


@pytest.mark.process
def test_every_block_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share timm's forward: beyond dynamo's limit of 8 graphs they would run uncompiled."""
    count = 0

    def counting(module: torch.nn.Module, **options: object) -> object:
        def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
            nonlocal count
            count += 1
            return graph.forward

        return compile_(module, backend=backend, **options)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", counting)
    names = list(PRESETS)[:9]
    rows = attention.run(names, SHAPE, ["compiled"], Setup("cpu", torch.float32, rounds=2))
    assert len(rows) == count > 8


def test_every_length_has_a_table_with_its_conditions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["attention", "--presets", "talking-heads", *SMALL, "--clock", "cpu", "--causal"]
    assert main([*arguments, "--tokens", "5", "7", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for tokens in (5, 7):
        text = (tmp_path / f"attention-cpu-{tokens}-causal.md").read_text()
        assert text in printed
        assert f"{tokens} tokens, causal" in text
        for text_part in ("load average", f"torch {torch.__version__}", "CPU time", "thread"):
            assert text_part in text
        rows = read_table(tmp_path / f"attention-cpu-{tokens}-causal.csv")
        assert [row["name"] for row in rows] == [attention.BASELINE, "talking-heads"]
        assert all(row["torch"] == torch.__version__ for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention --presets beleif", "did you mean 'belief'?"),
        ("attention --modes egaer", "invalid choice: 'egaer' (choose from"),
        ("attention --rounds 1", "an interquartile range needs at least 2"),
        ("attention --presets mgk --dim 10 --heads 3", "3 heads do not divide a width of 10"),
        ("memory --presets mgk/windows", "unknown preset 'mgk/windows'"),
        ("attention --presets zzzz", f"unknown preset 'zzzz'; of {len(PRESETS)} the nearest are "),
        ("memory --out /dev/null/x", "--out /dev/null/x: cannot be written: Not a dir"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()[-1]) < 200


def test_a_missing_gpu_is_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["memory", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.gpu
def test_blocks_are_measured_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["attention", "--device", "cuda", "--presets", "belief2", "mgk", "dcmha"]
    assert main([*arguments, "--rounds", "3", "--out", str(tmp_path)]) == 0
    rows = read_table(tmp_path / "attention-cuda-65.csv")
    assert {row["mode"] for row in rows} == {"eager", "compiled"}
    assert all(float(row["seconds"]) > 0 and int(row["peak"]) > 0 for row in rows)


def test_a_part_that_was_not_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks: dict[str, Counter[str]] = {"graph_break": Counter()}
    monkeypatch.setattr(torch._dynamo.utils, "counters", breaks)
    measure.check_graphs()
    breaks["graph_break"]["print was called"] += 1
    with pytest.raises(RuntimeError, match="a part of a block was not compiled: print was called"):
        measure.check_graphs()
