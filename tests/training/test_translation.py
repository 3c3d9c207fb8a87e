"""Translation: the loss, BLEU, values of sentences, and a cell that learns to translate."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.finished_cells import train_cell
from helpers.training_cells import cell_of, result_of
from torch.nn import functional as F

from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.data.text.ids import IGNORED
from lit_attn.tasks.beam_search import translate
from lit_attn.tasks.task import TranslationConfig
from lit_attn.tasks.translation import Translation, TranslationScores
from lit_attn.training.build import build

sacrebleu = pytest.importorskip("sacrebleu")

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DICTIONARY = {"der": "the", "hund": "dog", "kind": "child", "sieht": "sees", "ruft": "calls"}


def write(folder: Path) -> None:
    """Write sentences whose translation is word by word."""
    drawn = np.random.default_rng(0)
    for name, count in (("train", 300), ("valid", 20), ("test", 20)):
        words = [drawn.choice(list(DICTIONARY), drawn.integers(2, 6)) for _ in range(count)]
        for language, lines in (
            ("de", [" ".join(line) for line in words]),
            ("en", [" ".join(DICTIONARY[word] for word in line) for line in words]),
        ):
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")


def make_cell(folder: Path, epochs: int = 1, attention: str = "standard", **changes: Any) -> Cell:
    write(folder)
    data = {"kind": "parallel-text", "name": "words", "folder": str(folder), "vocabulary": 60}
    data |= {"batch_size": 128, "context": 32, "eval_batch_size": 8}
    task = {"kind": "translation", "label_smoothing": 0.1}
    experiment = {
        "task": task | changes.pop("task", {}),
        "data": data | changes.pop("data", {}),
        "model": {"kind": "encoder-decoder", "dim": 32, "depth": 1, "heads": 2}
        | {"ffn": {"width": 64}, "positions": "sinusoidal", "attention": attention}
        | {"embedding_scale": "sqrt-dim", "init": {"matrices": "torch", "embedding": 0.2}},
        "optimizer": {"kind": "adamw", "lr": 5e-3},
        "training": {"epochs": epochs, "accelerator": "cpu"} | changes.pop("training", {}),
    }
    return cell_of(experiment, metric={"name": "test/bleu", "goal": "max"}, **changes)


def make_task(folder: Path, **changes: Any) -> Translation:
    task = build(make_cell(folder, **changes), CPU).task
    assert isinstance(task, Translation)
    task.network.eval()
    return task


def test_the_loss_is_fairseqs_label_smoothed_cross_entropy(tmp_path: Path) -> None:
    """(1 - eps) of the target and eps / (V - 1) of every other token, mean over the targets."""
    task = make_task(tmp_path)
    batch = task.data.batch(0)
    source, inputs, targets, _ = batch
    log_p = task.network(source, inputs).log_softmax(-1)
    losses = []
    for row, place in (targets != IGNORED).nonzero().tolist():
        values = log_p[row, place]
        target = values[targets[row, place]]
        losses.append(-(1 - 0.1) * target - 0.1 / (60 - 1) * (values.sum() - target))
    torch.testing.assert_close(task.loss(batch), torch.stack(losses).mean())


@pytest.mark.parametrize(("world", "accumulate"), [(1, 2), (2, 1), (3, 2)])
def test_the_loss_of_a_step_depends_neither_on_ranks_nor_on_micro_batches(
    world: int, accumulate: int, tmp_path: Path
) -> None:
    task = make_task(tmp_path)
    expected = task.loss(task.data.batch(0))
    data = make_cell(tmp_path, data={"accumulate": accumulate}).experiment.data
    losses = []
    for rank in range(world):
        shared = on_rank(data.build(0, CPU), rank, world)
        losses += [task.loss(batch) for batch in shared.train_batches(0, 1)]
    assert len(losses) == world * accumulate
    torch.testing.assert_close(torch.stack(losses).mean(), expected)


def test_bleu_equals_sacrebleu_on_the_words_of_the_files(tmp_path: Path) -> None:
    """Translations are the references with some words exchanged; empty rows do not count."""
    task = make_task(tmp_path)
    scores = TranslationScores(task.data)
    drawn = np.random.default_rng(1)
    hypotheses, references = [], []
    loader = task.data.evaluation_loader("test")
    for rows, (_, _, targets) in zip(loader.units, loader, strict=True):
        translations = torch.full((len(targets), 30), IGNORED)
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            if row < 20:
                words = task.data.encoder.decode(target[target != IGNORED][:-1].tolist()).split()
                references.append(" ".join(words))
                words[drawn.integers(len(words))] = "dog"
                text = " ".join(words) + " calls" * int(drawn.integers(2))
                (ids,) = task.data.encoder.encode([text])
                translations[number, : len(ids)] = torch.tensor(ids.astype(np.int64))
                hypotheses.append(text)
        scores.update(torch.zeros(targets.shape), targets, translations)
    assert sorted(references) == sorted((tmp_path / "test.en").read_text().splitlines())
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True)
    assert 20 < expected.score < 90
    assert 100 * scores.compute()["bleu"].item() == pytest.approx(expected.score, rel=1e-5)
    scores.reset()
    scores.update(torch.zeros(1, 2), torch.tensor([[3, 1]]))
    assert set(scores.compute()) == {"loss", "perplexity"}


def test_unknown_characters_never_match(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    scores = TranslationScores(task.data)
    (ids,) = task.data.encoder.encode(["☃ the dog sees the dog"])
    target = torch.tensor([[*ids.tolist(), 1]])
    scores.update(torch.zeros(target.shape), target, target[:, :-1])
    assert scores.compute()["bleu"].item() < 0.9


def test_translating_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has another length of the caches, for which code would be compiled again."""
    graphs = []
    compile_with = torch.compile

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda forward: compile_with(forward, backend=backend))
    torch.compiler.reset()
    task = make_task(tmp_path, training={"compile": "blocks"})
    batch = next(iter(task.data.evaluation_loader("val")))
    translates = [False, True]
    monkeypatch.setattr(Translation, "is_translating", lambda task: translates.pop(0))
    with torch.no_grad():
        _, targets, none = task.evaluate(batch)
        compiled = len(graphs)
        _, _, translations = task.evaluate(batch)
    assert compiled > 0
    assert none.shape[1] == 0
    assert len(translations) == len(targets)
    assert translations.shape[1] > 3
    assert len(graphs) == compiled
    torch.compiler.reset()


def test_loss_and_values_of_sentences(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    task.is_translating = lambda: False  # type: ignore[method-assign]
    loader = task.data.evaluation_loader("val")
    scores, units = task.build_metrics("val"), []
    total, tokens = 0.0, 0
    for source, inputs, targets in loader:
        evaluated = task.evaluate((source, inputs, targets))
        scores.update(*evaluated)
        units.append(task.unit_values(*evaluated))
        logits = task.network(source, inputs)
        counted = targets != IGNORED
        total += F.cross_entropy(logits[counted], targets[counted], reduction="sum").item()
        tokens += int(counted.sum())
    values = scores.compute()
    assert values["loss"].item() == pytest.approx(total / tokens)
    assert values["perplexity"].item() == pytest.approx(np.exp(total / tokens))
    assert "bleu" not in values
    sums = torch.cat(units)[:, :2].sum(0)
    assert sums.tolist() == pytest.approx([total, tokens], rel=1e-5)


def test_a_cell_learns_to_translate_word_by_word(tmp_path: Path) -> None:
    """BLEU belongs to the last evaluation alone."""
    cell = make_cell(tmp_path, 24, "mgk", training={"evaluate_every": 2})
    folder = train_cell(cell, tmp_path / "cell")
    metrics = result_of(folder).metrics
    assert metrics["test/bleu"] > 0.9
    assert metrics["test/perplexity"] < 1.2
    rows = read_metrics(folder / "metrics.csv")
    assert [row.epoch for row in rows if row.name == "test/bleu"] == [23]
    assert len([row for row in rows if row.name == "test/loss"]) == 12
    arrays = np.load(folder / "units.npz")
    assert arrays["test/loss"].shape == (20,)
    lines = (tmp_path / "test.en").read_text().splitlines()
    task = make_task(tmp_path)
    encoded = [len(ids) + 1 for ids in task.data.encoder.encode(lines)]
    assert sorted(arrays["test/targets"]) == sorted(encoded)


def test_bleu_is_measured_every_few_epochs_and_at_every_evaluation_with_stopping(
    tmp_path: Path,
) -> None:
    folder = train_cell(make_cell(tmp_path, 5, task={"translate_every": 2}), tmp_path / "cell")
    rows = read_metrics(folder / "metrics.csv")
    assert [row.epoch for row in rows if row.name == "val/bleu"] == [1, 3, 4]
    cell = make_cell(tmp_path, 3, training={"stop": {"patience": 3}})
    folder = train_cell(cell, tmp_path / "stopping")
    rows = read_metrics(folder / "metrics.csv")
    assert [row.epoch for row in rows if row.name == "val/bleu"] == [0, 1, 2]


def test_the_settings_of_the_search_are_used(tmp_path: Path) -> None:
    task = make_task(tmp_path, task={"beams": 2, "length_penalty": 0.0, "ratio": 0.5, "extra": 1})
    task.is_translating = lambda: True  # type: ignore[method-assign]
    batch = next(iter(task.data.evaluation_loader("val")))
    *_, translations = task.evaluate(batch)
    search = TranslationConfig(beams=2, length_penalty=0.0, ratio=0.5, extra=1)
    expected = translate(task.network, batch[0], search)
    assert [row[row != IGNORED].tolist() for row in translations] == expected


def test_the_shortest_limit_allows_one_word(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    batch = next(iter(task.data.evaluation_loader("val")))
    words = translate(task.network, batch[0], TranslationConfig(ratio=0.0, extra=1))
    assert [len(ids) for ids in words] == [1] * len(batch[0])


def test_data_of_other_tasks_is_refused(tmp_path: Path) -> None:
    fields = make_cell(tmp_path).experiment.model_dump(mode="json")
    with pytest.raises(ValueError, match="'gpt' does not go with `data: parallel-text`"):
        Experiment.model_validate(
            fields | {"model": {"kind": "gpt", "dim": 8, "depth": 1, "heads": 1, "ffn": None}}
        )
