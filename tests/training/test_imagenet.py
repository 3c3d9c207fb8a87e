"""ImageNet set-ups at a small scale: two epochs on folders of real digits."""

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import pytest
import torch
from helpers.commands import run_python, start_python
from helpers.digit_folders import experiment, write
from helpers.finished_cells import assert_same, assert_same_weights, read_weights, train_cell
from helpers.paths import EXPERIMENTS, ROOT
from helpers.runs import TIMEOUT, wait_until
from helpers.shipped import shipped_studies
from helpers.stopping import run_until
from helpers.training_cells import cell_of, folder_of, result_of
from pydantic import ValidationError
from timm.layers import Mlp
from torch.nn import functional as F

from lit_attn.ablate.plan import expand
from lit_attn.config.cell import Cell
from lit_attn.config.training import Training
from lit_attn.data import loading
from lit_attn.models import vit
from lit_attn.models.vit import ImageViTConfig
from lit_attn.optim.standard import AdamW
from lit_attn.schema.plugins import load_parts
from lit_attn.schema.yaml_text import Mapping, Where, format_yaml
from lit_attn.signatures import ImageLabels
from lit_attn.tasks.base import TaskModule
from lit_attn.train import run_cell, time_cell

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("digits"))


def cell(root: Path, **changes: Any) -> Cell:
    return cell_of(experiment(root, **changes))


load_parts([EXPERIMENTS / "imagenet_local_vit" / "imagenet_local_vit.py"])
LOCAL = {"kind": "local-vit", "ffn": {"width": 16, "activation": "hard-swish"}}
GROWING = {
    "data": {"sizes": [8], "repeats": 2},
    "model": {**LOCAL, "positions": "replaced"},
    "training": {"average": {"decay": 0.9}},
}


@pytest.fixture(scope="module")
def uninterrupted(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_cell(cell(folders, **GROWING), tmp_path_factory.mktemp("whole"))


def test_a_cell_has_its_metrics_with_and_without_the_average(uninterrupted: Path) -> None:
    result = result_of(uninterrupted)
    assert (result.steps, result.epochs) == (8, 2)
    names = {"accuracy", "top5", "calibration", "loss"}
    assert {f"test/{name}" for name in names} <= result.metrics.keys()
    assert {f"test/averaged-{name}" for name in names} <= result.metrics.keys()
    assert result.metrics["test/averaged-loss"] != result.metrics["test/loss"]
    assert result.evaluation_time.count == 1
    assert 0 < result.evaluation_time.median < result.wall_time
    assert result.metrics["evaluation/seconds"] == result.evaluation_time.median


def test_resume_is_exact(folders: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """The cell stops within an epoch and at its end, when the image size changes."""
    folder = folder_of(cell(folders, **GROWING), tmp_path)
    for step in (3, 4, 5):
        run_until(step, folder)
    run_cell(folder)
    assert_same(folder, uninterrupted)


def record_weights(patch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Return a list that gets the weights after every step of a training."""
    observed: list[dict[str, torch.Tensor]] = []
    original = TaskModule.on_train_batch_end

    def record(self: TaskModule, *arguments: Any) -> None:
        original(self, *arguments)
        observed.append(copy.deepcopy(self.network.state_dict()))

    patch.setattr(TaskModule, "on_train_batch_end", record)
    return observed


def test_the_average_follows_its_recurrence(folders: Path, tmp_path: Path) -> None:
    """The test computes the recurrence from the weights after every step."""
    tasks: list[TaskModule] = []
    start: list[dict[str, torch.Tensor]] = []

    def starting(self: TaskModule, decay: float, steps: int) -> None:
        tasks.append(self)
        start.append(copy.deepcopy(self.network.state_dict()))
        averaging(self, decay, steps)

    averaging = TaskModule.average_weights
    with pytest.MonkeyPatch.context() as patch:
        observed = record_weights(patch)
        patch.setattr(TaskModule, "average_weights", starting)
        training = {"average": {"decay": 0.5}, "epochs": 1}
        train_cell(cell(folders, training=training), tmp_path)
    assert len(observed) == 4
    average = tasks[0].average
    for name, value in average.module.state_dict().items():
        expected = start[0][name]
        for step in observed:
            expected = 0.5 * expected + 0.5 * step[name]
        torch.testing.assert_close(value, expected)
    assert not any(p.requires_grad for p in average.parameters())
    written = torch.load(next(tmp_path.glob("**/averaged.pt")), weights_only=True)
    assert all(torch.equal(v, written[k]) for k, v in average.module.state_dict().items())


@pytest.mark.parametrize(("epochs", "last"), [(4, 3), (2, 5)])
def test_the_average_of_the_last_epochs_has_equal_weights(
    epochs: int, last: int, folders: Path, tmp_path: Path
) -> None:
    """A training with fewer epochs averages all of them, and none of the initial weights."""
    with pytest.MonkeyPatch.context() as patch:
        observed = record_weights(patch)
        training = {"average": {"epochs": last}, "epochs": epochs}
        train_cell(cell(folders, training=training), tmp_path)
    ends = observed[len(observed) // epochs - 1 :: len(observed) // epochs][-last:]
    assert len(ends) == min(epochs, last)
    written = torch.load(next(tmp_path.glob("**/averaged.pt")), weights_only=True)
    for name, value in written.items():
        torch.testing.assert_close(value, torch.stack([end[name] for end in ends]).mean(0))


def test_a_stopped_training_has_the_same_average_of_epochs(folders: Path, tmp_path: Path) -> None:
    selected = cell(folders, training={"average": {"epochs": 2}, "epochs": 3})
    averages = []
    for stops in ((), (5, 9)):
        folder = folder_of(selected, tmp_path / str(len(stops)))
        for step in stops:
            run_until(step, folder)
        run_cell(folder)
        averages.append(torch.load(next(folder.glob("**/averaged.pt")), weights_only=True))
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())


@pytest.mark.parametrize("average", [{}, {"decay": 1}, {"epochs": 1}])
def test_an_average_has_either_a_decay_or_epochs(average: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="average"):
        Training.model_validate({"epochs": 1, "average": average})


def resampled(positions: torch.Tensor, rows: int, other: int) -> torch.Tensor:
    """Return positions (1, 1 + rows^2, d) at the places of a grid with `other` rows."""
    grid = positions[:, 1:].mT.reshape(1, -1, rows, rows)
    grid = F.interpolate(grid, (other, other), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], grid.flatten(2).mT], 1)


@pytest.mark.parametrize("positions", ["learned", "replaced"])
def test_only_learned_positions_are_trained(positions: str, folders: Path, tmp_path: Path) -> None:
    model = {**LOCAL, "positions": positions}
    changes = {"model": model, "data": {"sizes": [8], "epochs_per_size": 2}}
    selected = cell(folders, **changes, training={"epochs": 3})
    folder = folder_of(selected, tmp_path)
    L.seed_everything(0, verbose=False)
    start = selected.experiment.model.build(ImageLabels((3, 16, 16), 4)).pos_embed.detach()
    run_cell(folder)
    # Both epochs with images of 8 pixels resample the 4 x 4 positions to 2 x 2 and back.
    smoothed = start
    for _ in range(2):
        smoothed = resampled(resampled(smoothed, 4, 2), 2, 4)
    trained = read_weights(folder)["pos_embed"]
    assert trained.shape == (1, 17, 16)
    assert not torch.equal(trained, start)
    assert torch.allclose(trained, smoothed, atol=1e-6) == (positions == "replaced")


def test_diagnostics_do_not_change_replaced_positions(folders: Path, tmp_path: Path) -> None:
    changes = {"model": {**LOCAL, "positions": "replaced"}, "data": {"sizes": [8]}}
    records = {"kinds": ["residual"], "first_epoch_every": 1}
    trained = []
    for diagnostics in (None, records):
        selected = cell(folders, **changes, training={"diagnostics": diagnostics})
        trained.append(train_cell(selected, tmp_path / str(bool(diagnostics))))
    assert_same_weights(*trained)


def test_the_cost_of_growing_images_is_estimated_at_their_final_size(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a cell, which are timed, have the smallest images."""
    observed = set()
    original = Mlp.forward

    def watching(self: Mlp, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            observed.add(x.shape[1] - 1)
        return original(self, x)

    monkeypatch.setattr(Mlp, "forward", watching)
    folder = folder_of(cell(folders, data={"sizes": [8]}), tmp_path)
    run_cell(folder, smoke=True)
    assert observed == {2 * 2}
    observed.clear()
    time_cell(folder)
    assert observed == {4 * 4}
    assert (folder / "timing.json").exists()


def test_weight_decay_applies_to_the_configured_parameters() -> None:
    model = ImageViTConfig(dim=16, depth=1, heads=2, patch=4)
    network = vit.build_image_vit(model, (3, 16, 16), 4)
    names = {id(p): name for name, p in network.named_parameters()}
    actual = {}
    for decay in ("weights", "matrices"):
        optimizer = AdamW(lr=1e-3, weight_decay=0.05, decay=decay).build(network)
        actual[decay] = {
            names[id(p)]: group["weight_decay"]
            for group in optimizer.param_groups
            for p in group["params"]
        }
        assert actual[decay].keys() == set(names.values())
    changed = {
        name for name in names.values() if actual["weights"][name] != actual["matrices"][name]
    }
    assert changed == {"cls_token", "pos_embed"}
    assert actual["weights"]["pos_embed"] == 0
    assert actual["weights"]["blocks.0.mlp.fc1.weight"] == 0.05
    assert actual["weights"]["norm.weight"] == 0


def test_sizes_need_positions_of_every_size(folders: Path) -> None:
    vit = {"kind": "vit", "patch": 4, "ffn": {"width": 16}}
    with pytest.raises(ValueError, match="'vit' has positions for images of one size"):
        cell(folders, data={"sizes": [8]}, model=vit)


@pytest.mark.slow
def test_a_study_trains_through_the_runner(folders: Path, tmp_path: Path) -> None:
    """The study's path is too long for a socket, and its cells have data workers."""
    actual = experiment(folders, data={"workers": 2})
    (tmp_path / "experiment.yaml").write_text(format_yaml(actual))
    study = {
        "title": "Digits in folders",
        "experiment": "experiment.yaml",
        "default": True,
        "seeds": 1,
        "cells": {"standard": {"attention": "standard"}, "belief": {"attention": "belief"}},
        "baseline": "standard",
        "match": "none",
    }
    (tmp_path / "ablations.yaml").write_text(format_yaml({"studies": {"digits": study}}))
    places = ["--out", str(tmp_path / ("runs" * 25)), "--reports", str(tmp_path / "reports")]
    command = ["lit_attn.ablate", str(tmp_path / "ablations.yaml"), *places, "--jobs", "1"]
    finished = run_python(tmp_path, "-m", *command)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    table = pd.read_csv(tmp_path / "reports" / "digits" / "table.csv")
    assert (table["evaluation_time"] > 0).all()
    assert "evaluation (s)" in (tmp_path / "reports" / "digits" / "table.full.md").read_text()


@pytest.mark.parametrize("study", [name for name in shipped_studies() if "imagenet" in name])
def test_every_variant_of_the_shipped_studies_trains(
    study: str, folders: Path, tmp_path: Path
) -> None:
    """Each has one layer of the published width, one step on small images and one evaluation."""
    changes = Mapping(Where("test"))
    settings = {
        "data.path": str(folders),
        "data.classes": 4,
        "data.size": 32,
        "data.batch_size": 4,
        "data.eval_batch_size": 4,
        "data.workers": 0,
        "model.depth": 1,
        "training.epochs": 9,
        "training.accelerator": "cpu",
        "optimizer.lr": 1e-3,
    }
    if study == "dcmha-imagenet":
        settings["data.validation"] = 8
    for key, value in settings.items():
        changes.put(key, value, changes.at)
    for job in expand(shipped_studies()[study], tmp_path, changes, seeds=(0,)).jobs:
        job.write_config()
        run_cell(job.folder, smoke=True)
        result = result_of(job.folder)
        assert 0 <= result.metrics["test/accuracy"] <= 1
        assert ("test/averaged-accuracy" in result.metrics) == (study == "belief2-imagenet")


@pytest.mark.skipif(sys.platform != "linux", reason="where the kernel ends workers is Linux's")
def test_a_signal_never_ends_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal before the first line of the worker's code does not end the worker either."""
    blocked_file = tmp_path / "held"

    def first(worker: int) -> None:
        blocked_file.write_text(str(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    monkeypatch.setattr(loading, "_start_worker", first)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    workers = loading.BatchWorkers(sum, 1)
    assert list(workers.read([[0, 1], [2, 3]])) == [1, 5]
    workers.close()
    assert blocked_file.read_text() == "True"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_a_signal_to_the_whole_group_leaves_the_readers_at_work(
    folders: Path, tmp_path: Path
) -> None:
    """The trainer must save a checkpoint after a SIGTERM to all processes of its cell."""
    endless = cell(folders, data={"workers": 2}, training={"epochs": 1000})
    folder = folder_of(endless, tmp_path)
    log = tmp_path / "log.txt"
    with log.open("w") as stream:
        words = ("-m", "lit_attn.train", str(folder))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        numbers = (stream.fileno(), stream.fileno())
        process = start_python(tmp_path, words, environment, *numbers, is_leader=True)
    try:
        wait_until((folder / "progress.json").exists)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(TIMEOUT) == 143, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "stopped by SIGTERM; saved at step" in log.read_text()
    assert list((folder / "checkpoints").glob("step-*.ckpt"))
