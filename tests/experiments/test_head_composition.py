"""The plug-in for head composition: questions, answers, the grid of tasks, and a trained cell."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data_ranks import on_rank
from helpers.training_cells import COMPOSITION, cell_of, folder_of
from pydantic import ValidationError

from lit_attn.cells.records import Result
from lit_attn.data.text.ids import IGNORED
from lit_attn.schema.plugins import load_parts
from lit_attn.train import run_cell

load_parts([COMPOSITION])
questions = importlib.import_module("head_composition")

CPU = torch.device("cpu")


def data(seed: int = 0, **changes: object) -> Any:
    fields = {"eval_questions": 4, "batch_size": 64, **changes}
    return questions.CompositionData(
        questions.HeadCompositionConfig.model_validate(fields), seed, CPU
    )


def find_source(lexicon: Any, question: list[int]) -> int:
    """Return the source that answers a question, computed from its tokens only."""
    facts = [tuple(question[i : i + 2]) for i in (0, 2, 4)]
    item, pattern = question[6], questions.PATTERNS[question[7] - lexicon.first_pattern]
    values = [value for _, value in facts]
    classes = {
        entity: lexicon.first_class + number
        for number, members in enumerate(lexicon.members)
        for entity in members.tolist()
    }
    sources = {
        "same-key": [value for key, value in facts if key == item],
        "other-key": [value for key, value in facts if key != item],
        "same-value": [key for key, value in facts if value == item],
        "different": [value for value in values if values.count(value) == 1],
        "other-class": [value for value in values if classes[value] != item],
    }[pattern]
    assert len(sources) == 1, "the question has one answer"
    return sources[0]


def test_answers_follow_from_the_questions() -> None:
    module = data()
    module.trained = np.arange(questions.TASKS)
    tasks = set()
    for step in range(10):
        for question, answer, task in zip(*(p.tolist() for p in module.batch(step)), strict=True):
            pattern, transformation = divmod(task, len(questions.TRANSFORMATIONS))
            lexicon = module.lexicon
            assert question[7] - lexicon.first_pattern == pattern
            assert question[8] - lexicon.first_transformation == transformation
            assert answer == lexicon.maps[transformation, find_source(lexicon, question)]
            tasks.add(task)
    assert tasks == set(range(questions.TASKS))


def test_the_source_of_an_answer_is_at_every_place() -> None:
    module = data()
    tokens, *_ = module.batch(0)
    places = [
        [k for k in range(6) if question[k] == find_source(module.lexicon, question)][-1] // 2
        for question in tokens.tolist()
    ]
    assert min(np.bincount(places, minlength=3)) > 10


def test_transformations_of_entities_match_their_names() -> None:
    lexicon = data().lexicon
    maps = dict(zip(questions.TRANSFORMATIONS, lexicon.maps, strict=True))
    entities = np.arange(16)
    assert (maps["copy"] == entities).all()
    assert np.bincount(maps["class"] - lexicon.first_class).tolist() == [4] * 4
    assert (maps["opposite"][maps["opposite"]] == entities).all()
    assert (maps["opposite"] != entities).all()
    step, reached = 0, set()
    while step not in reached:
        reached.add(step)
        step = int(maps["previous"][step])
    assert len(reached) == 16
    assert set(maps["capability"]) <= set(range(20, 24))


def test_the_diagonal_is_never_trained_and_always_evaluated() -> None:
    module = data()
    assert [questions.TASK_NAMES[task] for task in questions.HELD_OUT] == [
        f"{pattern}:{transformation}"
        for pattern, transformation in zip(
            questions.PATTERNS, questions.TRANSFORMATIONS, strict=True
        )
    ]
    trained = {task for step in range(20) for task in module.batch(step)[2].tolist()}
    assert trained == set(range(questions.TASKS)) - {0, 6, 12, 18, 24}
    for split in ("val", "test"):
        assert np.bincount(module.questions[split][2]).tolist() == [4] * questions.TASKS


def test_training_questions_depend_on_seed_and_step_but_evaluated_ones_do_not() -> None:
    first, again, other = data(), data(), data(seed=1)
    again.batch(3)
    assert torch.equal(first.batch(5)[0], again.batch(5)[0])
    assert not torch.equal(first.batch(5)[0], first.batch(6)[0])
    assert not torch.equal(first.batch(5)[0], other.batch(5)[0])
    assert first.fingerprint() == other.fingerprint()
    assert first.fingerprint() != data(eval_questions=5).fingerprint()
    assert not np.array_equal(first.questions["val"][0], first.questions["test"][0])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_questions(world: int) -> None:
    full_batch = data(batch_size=66).batch(2)[0]
    question_count = 0
    for rank in range(world):
        module = data(batch_size=66, eval_batch_size=32)
        on_rank(module, rank, world)
        assert torch.equal(module.batch(2)[0], full_batch[rank::world])
        (loader, *_) = module.val_dataloader()
        batches = list(loader)
        assert len(batches) == len(loader) == -(-100 // (32 * world))
        for number, (_, answers, _) in enumerate(batches):
            # A rank without questions has a batch of padding, which the task does not count.
            if loader.count_samples(number):
                question_count += int((answers != IGNORED).sum())
    assert question_count == 4 * questions.TASKS


def test_the_grid_counts_every_task_by_itself() -> None:
    grid = questions.Grid(questions.TASK_NAMES, held_out=(0,))
    answers = torch.tensor([3, 3, 4, 4, IGNORED])
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 4, 0]), 5) * 50.0
    grid.update(logits, answers, torch.tensor([0, 0, 1, 7, 0]))
    metrics = {key: value.item() for key, value in grid.compute().items()}
    assert metrics.pop("loss") == pytest.approx(50 / 4)
    assert metrics == {
        "accuracy": 0.75,
        "trained": 1.0,
        "held-out": 0.5,
        "same-key:copy": 0.5,
        "same-key:class": 1.0,
        "other-key:capability": 1.0,
    }


def test_micro_batches_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ValidationError, match="accumulate: 5 does not divide the batch of 64"):
        data(accumulate=5)


@pytest.mark.slow
def test_a_cell_learns_the_trained_tasks(tmp_path: Path) -> None:
    experiment = {
        "task": "head-composition",
        "data": {
            "kind": "head-composition",
            "batch_size": 64,
            "epoch_steps": 30,
            "eval_questions": 4,
            "eval_batch_size": 64,
            "accumulate": 2,
        },
        "model": {
            "kind": "gpt",
            "dim": 16,
            "depth": 1,
            "heads": 2,
            "ffn": {"width": 16},
            "init": {"matrices": 0.1, "embedding": 0.3},
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "training": {"epochs": 2, "accelerator": "cpu"},
    }
    metric = {"name": "test/held-out", "label": "accuracy (%)"}
    cell = cell_of(experiment, metric=metric, parts=[str(COMPOSITION)])
    folder = folder_of(cell, tmp_path)
    run_cell(folder)
    result = Result.model_validate_json((folder / "result.json").read_text())
    # Better than any of the 24 answers that there are.
    assert result.metrics["test/accuracy"] > 1.5 / 24
    assert result.metrics["test/loss"] < np.log(24)
    assert sum(key.startswith("test/") and ":" in key for key in result.metrics) == questions.TASKS
    assert result.metrics["train/tokens_per_second"] == pytest.approx(
        64 * questions.CONTEXT / result.step_time.median
    )
