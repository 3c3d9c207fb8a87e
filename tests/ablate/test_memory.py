"""`--gpu`, and the numbers of GPUs that `--cost` prints."""

from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate import memory
from lit_attn.ablate.__main__ import main
from lit_attn.ablate.gpus import GIBIBYTE, GPUS
from lit_attn.ablate.papers import Arrangement, Cost, format_costs
from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.schema.errors import ConfigError
from lit_attn.training.memory import MemoryEstimate

BODY = """\
baseline: a
cells: {a: {}, b: {attention: mgk}, c: {optimizer.lr: 0.5}}
"""


def make_estimate(weights: float, activations: float) -> MemoryEstimate:
    """Return an estimate of so many GiB, with Adam's states."""
    size = round(weights * GIBIBYTE)
    return MemoryEstimate(size, size, 2 * size, 0, round(activations * GIBIBYTE), 0)


def test_a_dry_run_prints_the_parts_and_whether_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "_ESTIMATES", {})
    assert main(["ablations.yaml", "--dry-run", "--gpu", "H100", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(
        "  memory of a training step on one device (MiB, estimated without a GPU; the work space "
        "of convolutions and libraries is not counted)"
    )
    headings, *rows = lines[start + 1 : start + 5]
    assert headings.split() == [
        "weights",
        "gradients",
        "optimizer",
        "averages",
        "activations",
        "outputs",
    ]
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert all(row.endswith("MiB fit on H100") for row in rows)
    # A learning rate takes no memory.
    assert len(memory._ESTIMATES) == 2


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (10, "40.0 GiB fit on H100"),
        (
            19,
            "may not fit: needs 76.0 GiB, and 90% of the 79.1 GiB of H100 (80 GB) are assumed to "
            "be usable",
        ),
        (24, "does not fit: needs 96.0 GiB, H100 (80 GB) has 79.1 GiB"),
    ],
)
def test_a_margin_of_the_memory_stays_free(weights: float, text: str) -> None:
    estimate = make_estimate(weights, 0)
    assert memory.describe_fit(estimate, "H100", GPUS["H100"]) == text


def test_sharding_divides_the_states_and_the_samples() -> None:
    estimate = make_estimate(25, 20)
    assert memory.shard(estimate, 1, 4) == estimate.total
    assert memory.shard(estimate, 4, 4) == (25 + 5) * GIBIBYTE
    # Each GPU has at least one sample.
    assert memory.shard(estimate, 8, 4) == (12.5 + 5) * GIBIBYTE


def test_the_estimate_of_a_sharded_cell_is_that_of_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    totals = []
    for strategy in ("ddp", "fsdp"):
        path = studies.write(
            tmp_path, BODY + f"\nset: {{training.devices: 2, training.strategy: {strategy}}}"
        )
        assert main([str(path), "--dry-run", "--gpu", "A100", "--out", str(tmp_path / "runs")]) == 0
        lines = capsys.readouterr().out.splitlines()
        (row,) = [line.split() for line in lines if line.startswith("  a ") and "fit on" in line]
        totals.append([float(size) for size in row[1:7]])
    replicated, sharded = totals
    # Weights, gradients, states and averages are divided; activations and outputs are not.
    assert sharded[:3] == pytest.approx([size / 2 for size in replicated[:3]], abs=0.06)
    assert sharded[4:] == replicated[4:]


def test_the_smallest_number_of_gpus_is_a_power_of_two() -> None:
    gpu = GPUS["H100"]
    assert memory.count_gpus(make_estimate(10, 10), gpu, 1) == 1
    assert memory.count_gpus(make_estimate(26, 27), gpu, 1) == 4
    assert memory.count_gpus(make_estimate(26, 80), gpu, 1) is None


def test_an_estimate_that_fails_is_one_sentence_of_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> MemoryEstimate:
        raise RuntimeError("no\nvalues")

    monkeypatch.setattr("lit_attn.training.memory.estimate_memory", fail)
    monkeypatch.setattr(memory, "_ESTIMATES", {})
    path = studies.write(tmp_path, BODY)
    assert main([str(path), "--dry-run", "--gpu", "A100", "--out", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "  a  the memory is unknown: " in output
    assert "RuntimeError: no values\n" in output
    matrix = expand(read_studies(path)["tiny"], tmp_path / "runs")
    variant = matrix.variants[0]
    with pytest.raises(ConfigError, match="the memory is unknown"):
        memory.estimate(variant.experiment, variant.match_to)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ([Cost(2, Arrangement(1)), Cost(3, Arrangement(1))], "5.0 h"),
        (
            [Cost(8, Arrangement(4)), Cost(4, Arrangement(2))],
            "does not fit on one H100: needs 4 with `training.strategy: fsdp` "
            "(estimate: 3.0 h on 4)",
        ),
        (
            [Cost(2, Arrangement(1)), Cost(8, Arrangement(4))],
            "2.0 h; larger models: does not fit on one H100: needs 4 with "
            "`training.strategy: fsdp` (estimate: 2.0 h on 4)",
        ),
        (
            [Cost(8, Arrangement(2)), Cost(8, Arrangement(4, recomputes=True))],
            "does not fit on one H100: needs 2 with `training.strategy: fsdp` (estimate: 4.0 h on "
            "2); larger models: does not fit on one H100: needs 4 with `training.strategy: fsdp` "
            "and `training.recompute: blocks` (estimate: 2.0 h on 4)",
        ),
        (
            [Cost(2, None)],
            "does not fit on any number of GPUs that can share a step",
        ),
    ],
)
def test_costs_of_large_models_name_the_gpus_that_they_need(costs: list[Cost], text: str) -> None:
    assert format_costs(costs, "H100") == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H100"], "--gpu: needs --dry-run"),
        (["--gpu", "H100", "--dry-run", "--json"], "--json: lists cells only; leave out --gpu"),
        (
            ["--gpu", "H100", "--dry-run", "--estimate"],
            "--gpu: lists cells with their memory; leave out --estimate",
        ),
    ],
)
def test_gpu_needs_a_dry_run_with_text(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(studies.write(tmp_path, BODY)), *arguments]) == 2
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "; did you mean 'H100'?"),
        ("RTX", "; choose from H100, H200, A100, A6000"),
    ],
)
@pytest.mark.parametrize("option", ["--gpu", "--cost"])
def test_an_unknown_gpu_is_refused_with_the_nearest_name(
    option: str, name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", option, name]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"argument {option}: unknown GPU '{name}'{hint}\n")
    assert error.count("\n") == 1


def test_a_program_has_less_memory_than_the_data_sheet_says() -> None:
    for gpu in GPUS.values():
        assert 0.97 * gpu.marketed < gpu.memory < gpu.marketed
