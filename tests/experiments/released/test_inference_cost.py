"""Memory and time of whole models, on short inputs, and their place in MGK's Table 7."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.paths import EXPERIMENTS, ROOT
from helpers.tables import read_table

from lit_attn.bench import measure
from lit_attn.papers.published import make_entries
from lit_attn.papers.source import read_paper
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "released" / "inference_cost.py"])
costs = importlib.import_module("inference_cost")

SHORT = ["mgk-retrieval", "softmax-8", "mlk-4", "--tokens=32", "--batch=2", "--rounds=2"]


def read_iteration(batch: int, precision: str = "fp32") -> object:
    file = ROOT / "ablations.yaml"
    (experiment,) = costs.read_experiments(file, "mgk-retrieval", ["softmax-8"], 32).values()
    return costs.build_iteration(experiment, batch, precision, "cpu")


def test_the_measured_costs_are_in_table_7(tmp_path: Path) -> None:
    """The file states the precision of the study; other rows stay empty."""
    out = tmp_path / "bench" / "mgk-retrieval"
    assert costs.main([*SHORT, f"--out={out}"]) == 0
    rows = {row["variant"]: row for row in read_table(out / "inference.csv")}
    assert [rows["mlk-4"][key] for key in ("batch", "tokens", "precision")] == ["2", "64", "fp16"]
    assert int(rows["softmax-8"]["parameters"]) == 265_218 - 64 * (512 - 32)
    assert not show_table(tmp_path)
    # The page shows measurements with the batch and the length of the table only.
    file = out / "inference.csv"
    file.write_text(file.read_text().replace(",2,64,fp16,", ",32,8192,fp16,"))
    shown = show_table(tmp_path)
    memory = {0: pytest.approx(int(rows["softmax-8"]["memory"]) / 1e9)}
    assert shown["Softmax 8 heads", "Memory (Gb)"] == memory
    seconds = {0: pytest.approx(float(rows["mlk-4"]["seconds"]))}
    assert shown["Transformer-MLK 4 heads", "Time overhead (seconds/iteration)"] == seconds
    assert len(shown) == 4


def show_table(runs: Path) -> dict[tuple[str, str], dict[int, float]]:
    """Return our values in MGK's Table 7, by row and column."""
    source = replace(read_paper("mgk", "", EXPERIMENTS / "papers"), runs=runs)
    grid = make_entries(source, source.paper.tables["7"], {})
    return {(e.row, e.column): e.values for line in grid for e in line if e.ours}


def test_memory_counts_weights_input_and_the_intermediate_results_of_a_batch() -> None:
    one = read_iteration(1)
    four = read_iteration(4)
    weights = sum(p.nbytes for p in [*one.network.parameters(), *one.network.buffers()])
    assert one.count_bytes() == weights + 2 * 32 * (8 + 1)  # token ids and a mask of a pair
    peaks = [measure.measure_memory(i, "cpu").peak for i in (one, four)]
    assert peaks[0] > 2 * 32 * 64 * 4  # the hidden states of a layer
    assert peaks[1] == pytest.approx(4 * peaks[0], rel=0.2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_matrix_products_have_the_stated_precision_and_no_gradients(precision: str) -> None:
    iteration = read_iteration(1, precision)
    types = []
    linear = next(m for m in iteration.network.modules() if isinstance(m, torch.nn.Linear))
    linear.register_forward_hook(lambda module, inputs, out: types.append(out.dtype))
    assert not iteration.forward().requires_grad
    assert set(types) == {getattr(torch, costs.PRECISIONS[precision])}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mgk-retrieva", "mgk-4"], "no study 'mgk-retrieva'; did you mean 'mgk-retrieval'?"),
        (
            ["mgk-retrieval", "mgk-44"],
            "study 'mgk-retrieval' has no variant 'mgk-44'; did you mean",
        ),
        (["digits", "standard", "--tokens", "9"], "--tokens: the data of study 'digits' have no"),
        ([*SHORT, "--rounds=1"], "--rounds: an interquartile range needs at least 2"),
        ([*SHORT, "--batch=0"], "--batch: '0' is not a number from 1 on"),
        ([*SHORT, "--tokens=0"], "--tokens: '0' is not a number from 1 on"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert costs.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
