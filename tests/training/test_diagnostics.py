"""Cells that record diagnostics: training is unchanged, and the records survive an interruption."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.finished_cells import assert_same, train_cell
from helpers.stopping import run_until
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell
from pydantic import ValidationError
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.backend_context import Context

from lit_attn.cells.records import Timing
from lit_attn.cells.rows import read_clock, read_diagnostics, read_metrics
from lit_attn.config.cell import Cell
from lit_attn.config.training import Training
from lit_attn.schema.errors import explain
from lit_attn.train import run_cell, time_cell
from lit_attn.training.diagnostics import DiagnosticsCallback

pytestmark = pytest.mark.process

KINDS = {"kinds": ["residual", "rank", "maps", "heads", "mixture"]}
RECORDS = ("diagnostics.csv", "attention.npz")


def cell(diagnostics: Any = KINDS, **training: Any) -> Cell:
    """Return a cell with a mixture whose pi changes at every step, and with dropout."""
    return digits_cell(
        model={"attention": {"similarity": {"kind": "mixture", "prior": "m-step"}}},
        training={"diagnostics": diagnostics, **training},
    )


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_cell(cell(), tmp_path_factory.mktemp("looked"))


def test_every_evaluation_is_diagnosed(diagnosed: Path) -> None:
    rows = read_diagnostics(diagnosed / "diagnostics.csv")
    assert sorted({row.step for row in rows}) == [4, 8, 12]
    assert {row.layer for row in rows} == {1, 2}
    assert {row.name for row in rows if row.head is None} == {
        *(
            f"{quantity}-{branch}{at}"
            for quantity in ("norm", "cos")
            for branch in ("mh", "delta")
            for at in ("", "@1")
        ),
        "captured-qk",
        "captured-ov",
    }
    assert {(row.head, row.name) for row in rows if row.head is not None} == {
        (head, name) for head in (1, 2) for name in ("rank", "pi-1", "pi-2")
    }
    assert len(rows) == 3 * 2 * (10 + 2 * 3)
    arrays = np.load(diagnosed / "attention.npz")
    assert arrays["rank.1"].shape == (32, 2)
    assert arrays["map.2"].shape == (2, 17, 17)


def test_tensorboard_has_every_value_and_the_means_of_every_layer(diagnosed: Path) -> None:
    """All values, also those after the training, are in one file, losses before diagnostics."""
    (file,) = diagnosed.rglob("*tfevents*")
    events = EventAccumulator(str(file)).Reload()
    actual = events.Scalars("within-layers/norm-mh/2")
    rows = read_diagnostics(diagnosed / "diagnostics.csv")
    expected = [row.value for row in rows if (row.layer, row.name) == (2, "norm-mh")]
    assert [event.step for event in actual] == [4, 8, 12]
    assert [event.value for event in actual] == pytest.approx(expected)
    assert not [row for row in read_metrics(diagnosed / "metrics.csv") if "norm" in row.name]
    assert [event.step for event in events.Scalars("val/loss")] == [4, 8, 12]
    assert [event.step for event in events.Scalars("test/accuracy")] == [4, 8, 12]
    (metric,) = events.Scalars("result/test/accuracy")
    assert metric.value == pytest.approx(result_of(diagnosed).metrics["test/accuracy"])
    assert list(diagnosed.rglob("hparams.yaml")) == []
    groups = {tag.partition("/")[0] for tag in events.scalars.Keys()}
    assert groups >= {"test", "train", "val"}
    assert max(groups) == "within-layers"


def test_hparams_columns_begin_with_what_differs_between_cells(
    diagnosed: Path, tmp_path: Path
) -> None:
    """The columns are those that the HPARAMS tab itself computes from the event files."""
    shutil.copytree(diagnosed, tmp_path / "one")
    other = digits_cell(optimizer={"lr": 0.01}, training={"diagnostics": KINDS})
    shutil.copytree(train_cell(other, tmp_path / "runs"), tmp_path / "two")
    shutil.rmtree(tmp_path / "runs")
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert set(runs.Runs()) == {"one", "two"}
    provider = MultiplexerDataProvider(runs, str(tmp_path))
    context = Context(TBContext(data_provider=provider))
    request = RequestContext()
    experiment = context.experiment_from_metadata(
        request,
        "",
        include_metrics=True,
        hparams_run_to_tag_to_content=context.hparams_metadata(request, ""),
        data_provider_hparams=[],
    )
    columns = [info.name for info in experiment.hparam_infos]
    assert set(columns[:2]) == {"model/attention/similarity/kind", "optimizer/lr"}
    assert {"seed", "variant", "training/epochs"} <= set(columns[2:])
    metrics = [info.name.tag for info in experiment.metric_infos]
    ends = [name.startswith("within-layers/") for name in metrics]
    assert {"val/loss", "test/accuracy"} < set(metrics)
    assert any(ends)
    assert ends == sorted(ends)


def test_diagnostics_do_not_change_the_cell(diagnosed: Path, tmp_path: Path) -> None:
    plain = train_cell(cell(None), tmp_path)
    assert cell(None).fingerprint == cell().fingerprint == cell({"kinds": ["rank"]}).fingerprint
    assert_same(plain, diagnosed)
    assert not any((plain / name).exists() for name in RECORDS)


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
def test_a_cell_under_a_profiler_is_diagnosed(diagnosed: Path, tmp_path: Path) -> None:
    """PyTorch's profiler registers hooks in every module, which cannot be copied."""
    folder = train_cell(cell(profiler="pytorch"), tmp_path)
    theirs = read_diagnostics(diagnosed / "diagnostics.csv")
    ours = read_diagnostics(folder / "diagnostics.csv")
    assert [row[:-1] for row in ours] == [row[:-1] for row in theirs]


@pytest.mark.parametrize("stops", [(4, 6, 7), (3, 8, 9)])
def test_a_resumed_cell_has_the_same_diagnostics(
    stops: tuple[int, ...], diagnosed: Path, tmp_path: Path
) -> None:
    folder = folder_of(cell(), tmp_path)
    for step in stops:
        run_until(step, folder)
    run_cell(folder)
    for name in RECORDS:
        assert (folder / name).read_bytes() == (diagnosed / name).read_bytes()


def test_rows_past_the_checkpoint_are_written_again(diagnosed: Path, tmp_path: Path) -> None:
    """A crash leaves rows of later evaluations and a torn row. Times are those of all attempts."""
    folder = folder_of(cell(), tmp_path)
    run_until(6, folder)
    first = read_clock(folder / "clock.csv")
    assert list(first) == [4]
    for name, rows in (
        ("diagnostics.csv", "8,1,,norm-mh,7.0\n8,1,,norm-de"),
        ("clock.csv", "8,9999.0\n12,99"),
    ):
        with (folder / name).open("a") as stream:
            stream.write(rows)
    run_cell(folder)
    assert (folder / "diagnostics.csv").read_bytes() == (diagnosed / "diagnostics.csv").read_bytes()
    times = read_clock(folder / "clock.csv")
    assert list(times) == [4, 8, 12]
    assert times[4] == first[4] < times[8] < times[12] < 9999


def test_every_second_evaluation_and_the_last_are_diagnosed(tmp_path: Path) -> None:
    """Evaluations follow steps 4, 8 and 10, the last step."""
    cell_config = cell({"kinds": ["heads"], "every": 2}, max_steps=10)
    rows = read_diagnostics(train_cell(cell_config, tmp_path) / "diagnostics.csv")
    assert sorted({row.step for row in rows}) == [8, 10]


def test_steps_of_the_first_epoch_are_diagnosed_without_changing_the_cell(
    diagnosed: Path, tmp_path: Path
) -> None:
    """An epoch has 4 steps. The training batch feeds the records within it."""
    settings = {"kinds": ["residual"], "first_epoch_every": 1, "every": 3}
    folder = train_cell(cell(settings), tmp_path)
    rows = read_diagnostics(folder / "diagnostics.csv")
    assert sorted({row.step for row in rows}) == [1, 2, 3, 12]
    assert (folder / "metrics.csv").read_bytes() == (diagnosed / "metrics.csv").read_bytes()


def test_diagnostics_describe_the_trained_weights_and_not_their_average(
    diagnosed: Path, tmp_path: Path
) -> None:
    folder = train_cell(cell(average={"decay": 0.9}), tmp_path)
    for name in RECORDS:
        assert (folder / name).read_bytes() == (diagnosed / name).read_bytes()


def test_an_estimate_includes_the_time_of_diagnostics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Diagnostics follow four of seven evaluations and take two seconds each."""
    original = DiagnosticsCallback.on_validation_end

    def slow(self: DiagnosticsCallback, *arguments: Any) -> None:
        original(self, *arguments)
        self.times = [2.0 for _ in self.times]

    monkeypatch.setattr(DiagnosticsCallback, "on_validation_end", slow)
    actual = []
    for diagnostics in (None, {"kinds": ["heads"], "every": 2}):
        cell_config = cell(diagnostics, epochs=7)
        folder = folder_of(cell_config, tmp_path / str(bool(diagnostics)))
        time_cell(folder)
        timing = Timing.model_validate_json((folder / "timing.json").read_bytes())
        result = result_of(folder)
        assert result.evaluation_time is not None
        assert timing.evaluations == 7
        actual.append(timing.evaluation_time - result.evaluation_time.median)
    assert actual == [pytest.approx(0), pytest.approx(2.0 * 4 / 7)]


def test_linear_keys_have_ranks_and_no_likelihood(tmp_path: Path) -> None:
    kinds = {"kinds": [*KINDS["kinds"], "likelihood"]}
    cell_config = text_cell(
        model={"attention": {"similarity": "linear"}}, training={"diagnostics": kinds}
    )
    folder = train_cell(cell_config, tmp_path)
    names = {row.name for row in read_diagnostics(folder / "diagnostics.csv")}
    assert {"norm-mh", "cos-delta", "captured-qk"} <= names
    assert "rank" in names
    assert not {"query-nll", "pi-1"} & names
    assert "map.1" in np.load(folder / "attention.npz")


def test_samples_beyond_the_first_evaluation_batch_are_read(tmp_path: Path) -> None:
    diagnostics = {"kinds": ["rank"], "samples": 20}
    cell_config = digits_cell(data={"eval_batch_size": 8}, training={"diagnostics": diagnostics})
    folder = train_cell(cell_config, tmp_path)
    assert len(np.load(folder / "attention.npz")["rank.1"]) == 20


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            {"kinds": ["rnak"]},
            "diagnostics.kinds.0: 'rnak' is not a choice; did you mean 'rank'?",
        ),
        (
            {"kinds": ["rank"], "sample": 4},
            "diagnostics.sample: unknown key 'sample'; did you mean",
        ),
        ({"kinds": ["rank"], "samples": 0}, "diagnostics.samples: input should be greater than 0"),
        ({"kinds": []}, "diagnostics.kinds: "),
        ({"samples": 4}, "diagnostics.kinds: this key is required"),
        (7, "diagnostics: "),
    ],
)
def test_mistakes_are_one_line(written: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        Training.model_validate({"epochs": 1, "diagnostics": written})
    line = str(explain(error.value, "a.yaml"))
    assert line.startswith(f"a.yaml: {message}")
    assert "\n" not in line
