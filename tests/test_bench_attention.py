"""The benchmark: matched blocks, honest ratios, and no number where parity fails."""

import subprocess
import sys
import time

import pytest
import torch

from lit_attn.attention import residual, spec
from lit_attn.bench import attention
from lit_attn.bench.__main__ import main
from lit_attn.bench.timing import interleaved, peak_memory

SHAPE = attention.Shape(batch=2, tokens=9, dim=24, heads=3)


def test_interleaved_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drift that hits both candidates alike leaves their ratio alone."""
    clock = {"now": 0.0, "slow": 1.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["now"])

    def takes(seconds: float) -> None:
        clock["now"] += seconds * clock["slow"]

    def base() -> None:
        clock["slow"] *= 1.5
        takes(1)

    timings = interleaved({"base": base, "double": lambda: takes(2)}, "base", 7, "cpu")
    assert timings["double"].ratio == pytest.approx(2)
    assert timings["double"].ratio_iqr == pytest.approx(0)
    assert timings["base"].iqr > 0


def test_peak_memory_counts_what_lives_at_once() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(100_000)

    def together() -> None:
        _ = [torch.ones(100_000) for _ in range(3)]

    one, three = peak_memory(one_after_the_other, "cpu"), peak_memory(together, "cpu")
    assert one == pytest.approx(400_000, rel=0.01)
    assert three == pytest.approx(1_200_000, rel=0.01)


@pytest.mark.parametrize("name", spec.PRESETS)
def test_blocks_have_matched_parameters(name: str) -> None:
    shape = attention.Shape()
    target = attention.parameters(attention.block(None, shape, shape.ratio * shape.dim))
    width = attention.matched_width(name, shape, target)
    matched = attention.parameters(attention.block(name, shape, width))
    assert abs(matched - target) <= (2 * shape.dim + 1) / 2


def test_rows_hold_ratios_and_memory() -> None:
    rows = attention.run(["belief"], SHAPE, ["eager"], "cpu", torch.float32, rounds=2)
    assert [row.name for row in rows] == [attention.BASELINE, "belief"]
    assert rows[0].timing is not None
    assert rows[0].timing.ratio == 1
    assert rows[0].memory_ratio == 1
    assert rows[1].parameters == rows[0].parameters


def test_no_number_where_parity_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = residual.projected
    monkeypatch.setattr(residual, "projected", lambda *a: right(*a) * 1.01)
    arguments = "attention --presets standard belief --batch 2 --tokens 9 --dim 24 --heads 3"
    code = main([*arguments.split(), "--modes", "eager", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert "no number" in next(line for line in lines if "| belief " in line)
    assert "no number" not in next(line for line in lines if "| standard " in line)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["attention", "--presets", "beleif"])
    assert "did you mean 'belief'?" in capsys.readouterr().err


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['bench', '--help']\n"
        "import runpy\n"
        "try: runpy.run_module('lit_attn.bench', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
