"""Classification of tokens: data, loss over the tokens that count, metrics, models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.finished_cells import train_cell
from helpers.table_files import write_rows
from helpers.training_cells import cell_of, folder_of, result_of
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.data.table_sets import TableTags
from lit_attn.data.text.ids import IGNORED
from lit_attn.data.text.labelled import TaggedData
from lit_attn.models import factory
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.classification import TokenClassification
from lit_attn.train import main
from lit_attn.training.build import build

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROWS: list[dict[str, Any]] = [
    {"tokens": ["In", "old", "Rome", "."], "tags": ["O", "O", "PLACE", "O"]},
    {"tokens": ["Ada"], "tags": ["PERSON"]},
    {"tokens": ["Ada", "left"], "tags": ["PERSON", "O"]},
    {"tokens": ["a", "b", "c"], "tags": ["O", "O", "O"]},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of `datasets` in the folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    return write_rows(path, ROWS if rows is None else rows)


def experiment(path: Path, model: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    small = {"kind": "sequence-classifier", "dim": 16, "depth": 1, "heads": 2, "ffn": {"width": 16}}
    chosen = {"kind": "table-tags", "train": str(path), "test": str(path), "name": "t"}
    chosen |= {"context": 12, "classes": 3, "batch_size": 4, "eval_batch_size": 3}
    return {
        "task": "token-classification",
        "data": chosen | data,
        "model": model or small,
        "optimizer": {"kind": "adamw", "lr": 3e-3},
        "training": {"epochs": 2, "accelerator": "cpu"},
    }


def make_cell(path: Path, model: dict[str, Any] | None = None, **data: Any) -> Cell:
    return cell_of(experiment(path, model, **data), metric={"name": "test/f1"})


def make_data(path: Path, **changes: Any) -> TaggedData:
    data = Experiment.model_validate(experiment(path, **changes)).data
    assert isinstance(data, TableTags)
    data.check_files()
    built = data.build(0, CPU)
    assert isinstance(built, TaggedData)
    return built


def make_task(path: Path, **data: Any) -> TokenClassification:
    task = build(make_cell(path, **data), CPU).task
    assert isinstance(task, TokenClassification)
    return task


CSV_ROWS = {
    "python": [{key: str(value) for key, value in row.items()} for row in ROWS],
    "words": [{key: " ".join(value) for key, value in row.items()} for row in ROWS],
}


@pytest.mark.parametrize("source", ["jsonl", "parquet", "python", "words"])
def test_the_class_of_a_word_is_at_its_first_token(source: str, tmp_path: Path) -> None:
    suffix = "csv" if source in CSV_ROWS else source
    data = make_data(write(tmp_path / f"a.{suffix}", CSV_ROWS.get(source)))
    tokens, present, classes = next(iter(data.val_dataloader()[0]))
    text = " In old Rome ."
    assert tokens[0].tolist() == [byte + 1 for byte in text.encode()[:12]]
    # Names are numbered in alphabetical order: O, PERSON, PLACE.
    expected = [IGNORED] * 12
    expected[0], expected[3], expected[7] = 0, 0, 2
    assert classes[0].tolist() == expected
    assert tokens[1].tolist() == [33, 66, 101, 98, *[0] * 8]
    assert present[1].tolist() == [True] * 4 + [False] * 8
    assert classes[1].tolist() == [1] + [IGNORED] * 11


def test_numbers_of_classes_stay_numbers(tmp_path: Path) -> None:
    rows = [{"tokens": "a b 10", "tags": "2 0 10"}, {"tokens": "x", "tags": "1"}]
    data = make_data(write(tmp_path / "a.csv", rows), classes=11, batch_size=2)
    classes = next(iter(data.val_dataloader()[0]))[2]
    assert classes[0][classes[0] != IGNORED].tolist() == [2, 0, 10]


def test_words_of_the_training_text_are_a_vocabulary(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b", "a", "<unk>"], "tags": [0, 1, 0, 1]}]
    train, test = write(tmp_path / "a.jsonl", rows), tmp_path / "b.jsonl"
    write(test, [{"tokens": ["b", "new"], "tags": [1, 0]}])
    words = {"kind": "words", "size": 4}
    data = make_data(train, test=str(test), tokenizer=words, classes=2, batch_size=1)
    (trained,), (tokens, _, classes) = data.samples["train"], next(iter(data.val_dataloader()[0]))
    a, b, _, unknown = trained.documents[0].tolist()
    assert tokens[0, :2].tolist() == [b, unknown]
    assert a != b
    assert classes[0, :2].tolist() == [1, 0]


def test_pooling_is_refused_where_every_token_is_classified(tmp_path: Path) -> None:
    model = {"kind": "sequence-classifier", "dim": 16, "depth": 1, "heads": 2, "ffn": None}
    with pytest.raises(ValidationError, match="pool: nothing is pooled if every token"):
        make_cell(tmp_path / "a.jsonl", model | {"pool": "zero-padded"})


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            {"tokens": ["a", "b"], "tags": ["O"]},
            {},
            "a.jsonl: row 4: 2 words and 1 classes; one class for each",
        ),
        ({"tokens": [], "tags": []}, {}, "a.jsonl: row 4: 0 words and 0 classes"),
        (
            {"tokens": ["a", "b"], "tags": ["O", "DATE"]},
            {},
            "data.classes: 3, but train has 4 names of classes: DATE, O, PERSON, PLACE; set 4",
        ),
        (None, {"label": "tag"}, "has no column 'tag'; did you mean 'tags'?"),
    ],
)
def test_bad_rows_are_one_line(
    row: dict[str, Any] | None,
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "a.jsonl", [*ROWS, *([] if row is None else [row])])
    assert main([str(folder_of(make_cell(path, **changes), tmp_path / "cell"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_word_without_tokens_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"tokens": ["a", " "], "tags": [0, 1]}])
    with pytest.raises(ConfigError, match=r"data\.train: .*a\.jsonl: row 0: a word is empty"):
        make_data(path, tokenizer={"kind": "words", "size": 2}, batch_size=1)


class Constant(nn.Module):
    """Network whose logits are given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor, present: Tensor) -> Tensor:
        return self.logits[: len(tokens)]


def test_loss_and_metrics_ignore_padding_and_later_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    task = make_task(path)
    batch = task.data.batch(0)
    classes = batch[2]
    logits = torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(0))
    task.network = Constant(logits)
    counted = classes != IGNORED
    assert counted.sum() == 3 + 1 + 2 + 3
    expected = F.cross_entropy(logits[counted], classes[counted])
    torch.testing.assert_close(task.loss(batch), expected)
    changed = torch.where(counted[..., None], logits, 100.0)
    task.network = Constant(changed)
    torch.testing.assert_close(task.loss(batch), expected)

    metrics = task.build_metrics("test")
    evaluated = task.evaluate(batch[:3])
    metrics.update(*evaluated)
    values = {name: value.item() for name, value in metrics.compute().items()}
    predicted, labels = logits[counted].argmax(1), classes[counted]
    assert values["loss"] == pytest.approx(expected.item())
    assert values["accuracy"] == pytest.approx((predicted == labels).float().mean().item())
    scores = []
    for number in range(3):
        hits = int(((predicted == number) & (labels == number)).sum())
        either = int((predicted == number).sum() + (labels == number).sum())
        scores.append(2 * hits / either if either else 0.0)
    assert values["f1"] == pytest.approx(sum(scores) / 3)

    units = task.unit_values(*evaluated)
    assert units[:, 1].tolist() == counted.sum(1).tolist()
    assert (units[:, 0].sum() / units[:, 1].sum()).item() == pytest.approx(expected.item())
    assert units[:, 2].sum() == (predicted == labels).sum()
    probabilities, targets = task.predictions(batch[:3], evaluated)
    torch.testing.assert_close(probabilities, logits[counted].softmax(1))
    assert torch.equal(targets, labels)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_the_loss_of_a_step_depends_neither_on_ranks_nor_on_micro_batches(
    world: int, accumulate: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl")
    task = make_task(path)
    expected = task.loss(task.data.batch(0))
    losses = []
    for rank in range(world):
        data = make_data(path, accumulate=accumulate)
        on_rank(data, rank, world)
        losses += [task.loss(batch) for batch in data.train_batches(0, 1)]
    assert len(losses) == world * accumulate
    torch.testing.assert_close(torch.stack(losses).mean(), expected)


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "model",
    [None, {"kind": "transformers", "architecture": "bert", "arguments": BERT}],
    ids=["sequence-classifier", "transformers"],
)
def test_a_cell_learns_to_tag(model: dict[str, Any] | None, tmp_path: Path) -> None:
    if model is not None:
        pytest.importorskip("transformers")
    cell = make_cell(write(tmp_path / "a.jsonl", ROWS * 5), model, context=16)
    fields = cell.model_dump(mode="json")
    fields["experiment"]["training"]["epochs"] = 30
    metrics = result_of(train_cell(Cell.model_validate(fields), tmp_path / "cell")).metrics
    assert metrics["test/accuracy"] > 0.9
    assert metrics["test/f1"] > 0.8
    assert metrics["test/loss"] < 0.6


def test_padding_does_not_change_the_logits_of_a_token(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    task = make_task(path)
    tokens, present, _ = next(iter(task.data.val_dataloader()[0]))
    network = task.network.eval()
    other = torch.where(present, tokens, 7)
    torch.testing.assert_close(network(other, present)[present], network(tokens, present)[present])
    signature = task.data.signature
    assert network(tokens, present).shape == (3, 12, signature.classes)
    config = Experiment.model_validate(experiment(path))
    assert factory.describe(config.model, config.data).parameters == factory.count(network)
