"""Cells of language models and of sequence classifiers: records, exact resume, bad data."""

import math
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.finished_cells import assert_same, read_weights, train_cell
from helpers.training_cells import DOCUMENTS, cell_of, folder_of, result_of, text_cell
from pydantic import ValidationError
from torch.nn import functional as F
from torchmetrics.utilities import dim_zero_sum

from lit_attn.attention.spec import PRESETS
from lit_attn.cells.failure import Preempted
from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.language import TokenLoss
from lit_attn.train import main, run_cell
from lit_attn.training import build
from lit_attn.training.recording import Progress

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_cell(text_cell(), tmp_path_factory.mktemp("whole"))


def test_a_finished_cell_has_a_complete_record(uninterrupted: Path) -> None:
    record = result_of(uninterrupted)
    assert (record.steps, record.epochs, record.selected_epoch) == (12, 3, 2)
    assert record.parameters == sum(w.numel() for w in read_weights(uninterrupted).values())
    # Per token and layer 4 d^2 of attention's matrices and 2 d w of the FFN's; then the logits.
    linear = 16 * (2 * (4 * 16**2 + 2 * 16 * 16) + 16 * 256)
    assert record.flops == 2 * linear + 2 * 2 * 2 * 16 * 16 * 16
    assert record.step_time.count == 12 - 5
    rows = read_metrics(uninterrupted / "metrics.csv")
    assert len([row for row in rows if "loss" in row.name]) == 3 * 3
    rates = [row.value for row in rows if row.name == "train/lr"]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2 / 4])
    # The speed is no value of a curve.
    tokens = 8 * 16 / record.step_time.median
    assert record.metrics["train/tokens_per_second"] == pytest.approx(tokens)
    assert not [row for row in rows if "tokens_per_second" in row.name]


def test_the_loss_counts_every_token_of_the_split_once(uninterrupted: Path) -> None:
    cell = text_cell()
    network = factory.build(cell.experiment.model, cell.experiment.data).eval()
    network.load_state_dict(read_weights(uninterrupted))
    text = (DOCUMENTS / "test.txt").read_bytes()
    ids = torch.tensor(list(text))
    total = 0.0
    for start in range(0, len(ids) - 1, 16):
        window = ids[start : start + 17]
        logits = network(window[None, :-1])[0]
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    actual = result_of(uninterrupted).metrics
    tokens = len(ids) - 1
    # A document ends with byte 0, which is a token and no text.
    assert actual["test/loss"] == pytest.approx(total / tokens, rel=1e-3)
    assert actual["test/perplexity"] == pytest.approx(math.exp(actual["test/loss"]))
    bits = actual["test/loss"] * (tokens + 1) / len(text) / math.log(2)
    assert actual["test/bits_per_byte"] == pytest.approx(bits)


@pytest.mark.parametrize("stride", [1, 5])
def test_a_sliding_window_gives_every_token_its_context(stride: int) -> None:
    """MGK's protocol has stride 1: beyond the first window every token has 16 tokens of context."""
    cell = text_cell(data={"eval_stride": stride, "eval_tokens": 60}, model={"dropout": 0})
    data, task, *_ = build.build(cell, torch.device("cpu"))
    task.eval()
    metric = TokenLoss()
    loader = data.val_dataloader()[data.splits.index("test")]
    ids = torch.tensor(list((DOCUMENTS / "test.txt").read_bytes()[:61]))
    total = 0.0
    with torch.no_grad():
        for batch in loader:
            metric.update(*task.evaluate(batch))
        for place in range(1, 61):
            # The window that first reaches this token.
            first = max(0, -(-(place - 16) // stride) * stride)
            logits = task.network(ids[None, first:place])[0, -1]
            total += F.cross_entropy(logits, ids[place]).item()
    assert metric.tokens == 60
    assert metric.compute()["loss"].item() == pytest.approx(total / 60, rel=1e-5)


def test_a_study_may_compare_speed(tmp_path: Path) -> None:
    fields = text_cell(training={"max_steps": 2}).model_dump(mode="json")
    fields["metric"] = {"name": "train/tokens_per_second", "goal": "max", "scale": 0.001}
    actual = result_of(train_cell(Cell.model_validate(fields), tmp_path))
    assert actual.metrics["train/tokens_per_second"] > 0
    assert actual.metrics["test/loss"] > 0


def test_the_loss_does_not_depend_on_the_batches() -> None:
    metric = TokenLoss(bytes_per_token=2.0)
    metric.update(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5, 5, 5]]))
    metric.update(torch.tensor([[6.0, 0.0, 0.0]]), torch.tensor([[5, -100, -100]]))
    actual = metric.compute()
    assert actual["loss"] == 3.0
    assert actual["perplexity"] == pytest.approx(math.exp(3))
    assert actual["bits_per_byte"] == pytest.approx(1.5 / math.log(2))
    metric = TokenLoss()
    metric.update(torch.ones(1, 1), torch.ones(1, 1))
    assert metric.compute().keys() == {"loss", "perplexity"}


@pytest.mark.parametrize("stops", [((1, 1), (6, 4), (13, 11)), ((6, 3), (1, 4))])
def test_resume_is_exact(
    stops: tuple[tuple[int, int], ...],
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attempts end between micro-batches, between steps, or at the end of an epoch.

    Each one ends after a number of its own micro-batches, and has saved the step of the last one.
    """
    original = Progress.on_train_batch_end
    folder = folder_of(text_cell(), tmp_path)
    for micro_batches, saved in stops:
        observed: list[Any] = []

        def stopping(
            self: Any, *arguments: Any, ended: list[Any] = observed, end: int = micro_batches
        ) -> None:
            ended.append(arguments)
            if len(ended) == end:
                os.kill(os.getpid(), signal.SIGTERM)
            original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Progress, "on_train_batch_end", stopping)
            with pytest.raises(Preempted, match=f"saved at step {saved}$"):
                run_cell(folder)
    run_cell(folder)
    assert_same(folder, uninterrupted)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 4), (2, 1), (2, 2), (4, 2)])
def test_the_gradient_of_a_step_is_the_same_on_any_number_of_devices(
    world: int, accumulate: int
) -> None:
    """Gradients are averaged over ranks and micro-batches, so these must have equal sizes."""

    def gradient(world: int, accumulate: int) -> torch.Tensor:
        cell = text_cell(data={"accumulate": accumulate}, model={"dropout": 0})
        data, task, *_ = build.build(cell, torch.device("cpu"))
        for rank in range(world):
            data.trainer = SimpleNamespace(
                global_rank=rank, world_size=world, global_step=3, max_steps=4
            )
            parts = list(data.train_dataloader())
            assert [len(inputs) for inputs, _ in parts] == [8 // world // accumulate] * accumulate
            for part in parts:
                (task.loss(part) / accumulate / world).backward()
        return torch.cat([p.grad.flatten() for p in task.network.parameters()])

    single = gradient(1, 1)
    torch.testing.assert_close(gradient(world, accumulate), single, rtol=1e-4, atol=1e-7)
    assert single.norm() > 1e-2


def test_losses_of_ranks_add_up() -> None:
    """The sum over ranks gives every token the same weight, also if ranks have unequal shares."""
    single, ranks = TokenLoss(), [TokenLoss(), TokenLoss()]
    for rank, nll, target in [(0, 1.0, 5), (0, 2.0, 5), (0, 4.0, 5), (1, 9.0, 5), (1, 0.0, -100)]:
        for metric in (single, ranks[rank]):
            metric.update(torch.tensor([[nll]]), torch.tensor([[target]]))
    merged = TokenLoss()
    assert set(merged._reductions.values()) == {dim_zero_sum}
    merged.total, merged.tokens = (
        dim_zero_sum(torch.stack([getattr(rank, name) for rank in ranks]))
        for name in ("total", "tokens")
    )
    merged._update_count = 1
    assert merged.compute()["loss"] == single.compute()["loss"] == 4.0


def test_micro_batches_add_up_to_the_step(tmp_path: Path) -> None:
    model = {"dropout": 0}
    single = train_cell(text_cell(data={"accumulate": 1}, model=model), tmp_path / "1")
    accumulated = train_cell(text_cell(data={"accumulate": 4}, model=model), tmp_path / "4")
    assert result_of(single).steps == result_of(accumulated).steps
    for name, tensor in read_weights(single).items():
        torch.testing.assert_close(tensor, read_weights(accumulated)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "uniform"),
    [
        ({"attention": PRESETS["belief2"]}, math.log(256)),
        (
            {"attention": PRESETS["dcmha"], "positions": "rotary"},
            math.log(256),
        ),
        # One of 40 tokens and two clusters, then one of the cluster: most bytes of text are there.
        (
            {"attention": PRESETS["mgk"], "head": "adaptive", "cutoffs": [40, 100]},
            math.log(42) + math.log(60),
        ),
    ],
)
def test_smoke_is_one_step(model: dict[str, Any], uniform: float, tmp_path: Path) -> None:
    folder = folder_of(text_cell(model=model), tmp_path)
    run_cell(folder, smoke=True)
    assert result_of(folder).steps == 1
    assert result_of(folder).metrics["test/loss"] == pytest.approx(uniform, rel=0.3)


def test_sequences_are_classified(tmp_path: Path) -> None:
    data = {"kind": "listops", "context": 40, "lengths": [5, 40], "depth": 3}
    data |= {"train": 64, "val": 10, "test": 33, "batch_size": 16, "eval_batch_size": 32}
    sizes = {"dim": 16, "depth": 1, "heads": 2, "ffn": {"width": 16}}
    experiment = {
        "task": "sequence-classification",
        "data": data,
        "model": {"kind": "sequence-classifier", **sizes},
        "optimizer": {"kind": "adamw", "lr": 1e-3},
        "training": {"epochs": 1, "accelerator": "cpu"},
    }
    actual = result_of(train_cell(cell_of(experiment), tmp_path)).metrics
    # 33 samples fill one batch and one row of the next, whose other rows count for nothing.
    assert actual["test/accuracy"] * 33 == pytest.approx(round(actual["test/accuracy"] * 33))
    assert 0 < actual["test/loss"] < 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "missing.txt"}, "missing.txt: cannot be read: No such file"),
        ({"context": 10**6}, "data.context: train has"),
        ({"kind": "shards", "train": None, "test": None, "folder": "nowhere"}, "nowhere"),
    ],
)
def test_impossible_data_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = text_cell().model_dump(mode="json")
    data = {**fields["experiment"]["data"], **changes}
    if data["kind"] == "shards":
        data = {key: data[key] for key in ("kind", "name", "folder")}
    fields["experiment"]["data"] = data
    assert main([str(folder_of(Cell.model_validate(fields), tmp_path))]) == 2
    error_output = capsys.readouterr().err
    assert re.search(re.escape(message), error_output)
    assert error_output.count("\n") == 1


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"name": "test/loss"}, "metric: 'test/loss': this data has these splits: val"),
        ({"name": "accuracy"}, "metric: 'accuracy': this data has these splits: val"),
    ],
)
def test_a_metric_without_a_split_is_reported_before_training(
    metric: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = text_cell(data={"test": None}).model_dump(mode="json")
    fields["metric"] = {**fields["metric"], **metric}
    folder = folder_of(Cell.model_validate(fields), tmp_path)
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert not (folder / "metrics.csv").exists()


def test_a_mixture_limits_the_context() -> None:
    keys = {"kind": "mixture", "prior": "clamped", "prior_scope": "position", "positions": 15}
    with pytest.raises(ValidationError, match="positions: 15 are fewer than the 16 tokens of data"):
        text_cell(model={"attention": {"similarity": keys}})


def test_a_token_beyond_the_vocabulary_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes([1, 200] * 400))
    (tmp_path / "val.bin").write_bytes(bytes([1, 0] * 400))
    data = {"kind": "shards", "name": "s", "folder": str(tmp_path), "context": 16}
    fields = text_cell().model_dump(mode="json")
    fields["experiment"]["data"] = data
    fields["metric"]["name"] = "val/loss"
    folder = folder_of(Cell.model_validate(fields), tmp_path)
    with pytest.raises(ConfigError, match=r"train.bin: token \d+ is 51201, beyond the vocabulary"):
        run_cell(folder)
