"""Cells that record diagnostics: the same cells, with one more record, whatever stops them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.stopping import stop_at, weights
from helpers.training_cells import digits_cell, folder_of, text_cell
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_attn.cells.failure import Preempted
from lit_attn.cells.records import Result, Timing, read_diagnostics, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.config.training import Training
from lit_attn.schema.errors import explain
from lit_attn.train import run_cell, time_cell
from lit_attn.training.diagnostics import DiagnosticsCallback

KINDS = ["residual", "rank", "maps", "heads", "mixture"]
RECORDS = ("diagnostics.csv", "attention.npz")


def cell(diagnostics: Any = KINDS, **training: Any) -> Cell:
    """A mixture whose pi changes at every step, with dropout to draw numbers for."""
    return digits_cell(
        model={"attention": {"similarity": {"kind": "mixture", "prior": "m-step"}}},
        training={"diagnostics": diagnostics, **training},
    )


def run(made: Cell, root: Path) -> Path:
    folder = folder_of(made, root)
    run_cell(folder)
    return folder


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(cell(), tmp_path_factory.mktemp("looked"))


def test_a_record_of_every_evaluation(looked: Path) -> None:
    rows = read_diagnostics(looked / "diagnostics.csv")
    assert sorted({row.step for row in rows}) == [4, 8, 12]
    assert {row.layer for row in rows} == {1, 2}
    assert {row.name for row in rows if row.head is None} == {
        *(
            f"{what}-{of}{at}"
            for what in ("norm", "cos")
            for of in ("mh", "delta")
            for at in ("", "@1")
        ),
        "captured-qk",
        "captured-ov",
    }
    assert {(row.head, row.name) for row in rows if row.head is not None} == {
        (head, name) for head in (1, 2) for name in ("rank", "pi-1", "pi-2")
    }
    assert len(rows) == 3 * 2 * (10 + 2 * 3)
    arrays = np.load(looked / "attention.npz")
    assert arrays["rank.1"].shape == (32, 2)
    assert arrays["map.2"].shape == (2, 17, 17)


def test_tensorboard_has_the_layers(looked: Path) -> None:
    events = EventAccumulator(str(looked)).Reload()
    found = events.Scalars("diagnostics/norm-mh/layer-2")
    rows = read_diagnostics(looked / "diagnostics.csv")
    expected = [row.value for row in rows if (row.layer, row.name) == (2, "norm-mh")]
    assert [event.step for event in found] == [4, 8, 12]
    assert [event.value for event in found] == pytest.approx(expected)
    assert not [row for row in read_metrics(looked / "metrics.csv") if "norm" in row.name]


def test_the_cell_is_the_same_without(looked: Path, tmp_path: Path) -> None:
    plain = run(cell(None), tmp_path)
    assert cell(None).fingerprint == cell().fingerprint == cell(["rank"]).fingerprint
    theirs = weights(looked)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(plain).items())
    assert (plain / "metrics.csv").read_bytes() == (looked / "metrics.csv").read_bytes()
    assert not any((plain / name).exists() for name in RECORDS)


@pytest.mark.parametrize("stops", [(4,), (6, 7), (3, 8, 9)])
def test_stopped_and_gone_on(
    stops: tuple[int, ...], looked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(cell(), tmp_path)
    for step in stops:
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(Preempted):
                run_cell(folder)
    run_cell(folder)
    for name in RECORDS:
        assert (folder / name).read_bytes() == (looked / name).read_bytes()


def test_rows_past_the_checkpoint_are_written_again(
    looked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash leaves rows of later evaluations behind, the last one torn."""
    folder = folder_of(cell(), tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        with pytest.raises(Preempted):
            run_cell(folder)
    with (folder / "diagnostics.csv").open("a") as stream:
        stream.write("8,1,,norm-mh,7.0\n8,1,,norm-de")
    run_cell(folder)
    assert (folder / "diagnostics.csv").read_bytes() == (looked / "diagnostics.csv").read_bytes()


def test_some_evaluations_and_the_last(tmp_path: Path) -> None:
    """Every second of those after steps 4, 8 and 10, where training is cut short."""
    made = cell({"kinds": ["heads"], "every": 2}, max_steps=10)
    rows = read_diagnostics(run(made, tmp_path) / "diagnostics.csv")
    assert sorted({row.step for row in rows}) == [8, 10]


def test_the_trained_weights_and_not_their_average(looked: Path, tmp_path: Path) -> None:
    folder = run(cell(ema=0.9), tmp_path)
    for name in RECORDS:
        assert (folder / name).read_bytes() == (looked / name).read_bytes()


def test_an_estimate_counts_the_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Diagnostics follow four of seven evaluations and take two seconds each."""
    original = DiagnosticsCallback.on_validation_end

    def slow(self: DiagnosticsCallback, *given: Any) -> None:
        original(self, *given)
        self.times = [2.0 for _ in self.times]

    monkeypatch.setattr(DiagnosticsCallback, "on_validation_end", slow)
    found = []
    for diagnostics in (None, {"kinds": ["heads"], "every": 2}):
        made = cell(diagnostics, epochs=7)
        folder = folder_of(made, tmp_path / str(bool(diagnostics)))
        time_cell(folder)
        timing = Timing.model_validate_json((folder / "timing.json").read_bytes())
        result = Result.model_validate_json((folder / "result.json").read_bytes())
        assert result.evaluation_time is not None
        assert timing.evaluations == 7
        found.append(timing.evaluation_time - result.evaluation_time.median)
    assert found == [pytest.approx(0), pytest.approx(2.0 * 4 / 7)]


def test_linear_keys_have_no_attention_matrix(tmp_path: Path) -> None:
    made = text_cell(model={"attention": {"similarity": "linear"}}, training={"diagnostics": KINDS})
    folder = run(made, tmp_path)
    names = {row.name for row in read_diagnostics(folder / "diagnostics.csv")}
    assert {"norm-mh", "cos-delta", "captured-qk"} <= names
    assert not {"rank", "pi-1"} & names
    assert not (folder / "attention.npz").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnak"], "diagnostics: 'rnak' is not a diagnostic; did you mean 'rank'?"),
        (["rank", "rank"], "diagnostics: kinds: a kind is written twice"),
        (
            {"kinds": ["rank"], "sample": 4},
            "diagnostics.sample: unknown key 'sample'; did you mean",
        ),
        (
            {"kinds": ["heads", "mixture"], "samples": 4},
            "diagnostics: samples: heads and mixture read weights and no samples",
        ),
        ({"kinds": ["rank"], "samples": 0}, "diagnostics.samples: input should be greater than 0"),
        ([], "diagnostics.kinds: "),
        ({"samples": 4}, "diagnostics.kinds: this key is required"),
        (7, "diagnostics: "),
    ],
)
def test_mistakes_are_one_line(given: Any, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        Training.model_validate({"epochs": 1, "diagnostics": given})
    line = str(explain(error.value, "a.yaml"))
    assert line.startswith(f"a.yaml: {said}")
    assert "\n" not in line


def test_kinds_alone_stand_for_the_mapping() -> None:
    for given in ("rank", ["rank"], {"kinds": ["rank"]}):
        training = Training.model_validate({"epochs": 1, "diagnostics": given})
        assert training.diagnostics is not None
        assert training.diagnostics.kinds == ("rank",)
        assert Training.model_validate(training.model_dump(mode="json")) == training
