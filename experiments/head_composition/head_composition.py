"""Plug-in for head composition: questions whose answer needs two heads in sequence.

The study `dcmha-synthetic` names this file under `parts`.

Source: DCMHA (arXiv:2405.08553), section 4.3 and Table 11 (docs/setups.md, section 11).

Shapes: B batch, n = 9 tokens of a question. tokens: (B, n), answers and tasks: (B,), all int64.

A question is `key value key value key value item pattern transformation`. Its answer, the token
that follows, is the transformation of the source, which the pattern selects:

    same-key      the value whose key is the item            "John has an apple. ... John has"
    other-key     two keys are the item; the third's value    "... what John does not own"
    same-value    the key whose value is the item            "who possesses shoes"
    different     two values are one; the third               "which is different"
    other-class   the value that is not of the item's class   "which is not fruit"

Task t is pattern t // 5 and transformation t % 5.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from lit_attn.data.base import TokenData
from lit_attn.data.module import EvaluationLoader, TokenDataModule, numpy_generator
from lit_attn.data.sets import digest
from lit_attn.data.text.ids import IGNORED
from lit_attn.signatures import CausalTokens
from lit_attn.tasks.base import TaskModule
from lit_attn.tasks.task import MetricInfo, Task, percent

Ids = NDArray[np.int64]
Batch = tuple[Tensor, Tensor, Tensor]

# Patterns: how the query finds its source (the QK circuit of a head).
PATTERNS = ("same-key", "other-key", "same-value", "different", "other-class")

# Transformations: how the answer follows from the source (the OV circuit of a head).
TRANSFORMATIONS = ("copy", "class", "capability", "opposite", "previous")

# Names of the tasks; task t has pattern t // 5 and transformation t % 5.
TASK_NAMES = tuple(f"{pattern}:{change}" for pattern in PATTERNS for change in TRANSFORMATIONS)

TASKS = len(TASK_NAMES)
FIXED = 0  # Seed of the lexicon and of the evaluated questions, whatever the seed of the cell.

# Tasks that are evaluated and not trained: the diagonal of the grid.
HELD_OUT = tuple(range(0, len(TASK_NAMES), len(TRANSFORMATIONS) + 1))

# A question has three facts (key and value), then the query: item, pattern, transformation.
FACTS = 3
CONTEXT = 2 * FACTS + 3

# Opposites are pairs of entities, and classes have the same size.
ENTITIES, CLASSES, CAPABILITIES = 16, 4, 4

# Ids: entities, classes, capabilities, patterns, transformations, a blank.
VOCABULARY = ENTITIES + CLASSES + CAPABILITIES + len(PATTERNS) + len(TRANSFORMATIONS) + 1


@dataclass(frozen=True)
class Questions(CausalTokens):
    """Questions of `context` tokens, each answered by the token that follows.

    Batches are tokens (B, n), answers (B,) and the number of each question's task (B,), all int64;
    rows with the answer -100 pad a batch and do not count. `held_out` are the numbers of the tasks
    that are not trained.
    """

    tasks: tuple[str, ...] = ()
    held_out: tuple[int, ...] = ()


class HeadCompositionConfig(TokenData, kind="head-composition"):
    """Questions on three facts; each pattern with each transformation is one task.

    DCMHA asks trained language models 74 such tasks in words ("John has an apple. Mary has a dog.
    So John has a kind of ..."). Here entities are symbols, tokens name pattern and transformation,
    and the model is trained on the questions. The five tasks on the diagonal of the grid are not
    trained, so the model meets their two halves only in other tasks.

    An epoch is `epoch_steps` steps of new questions. Evaluated questions are equal for all seeds.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    context: ClassVar = CONTEXT
    batch_size: PositiveInt = Field(128, description="questions of a step, over all devices")
    epoch_steps: PositiveInt = Field(100, description="training steps of an epoch")
    eval_batch_size: PositiveInt = Field(512, description="questions of an evaluation batch")
    eval_questions: PositiveInt = Field(
        80, description="evaluation questions of each task in each split"
    )

    def signature(self) -> Questions:
        return Questions(VOCABULARY, CONTEXT, TASK_NAMES, HELD_OUT)

    def build(self, seed: int, device: torch.device) -> "CompositionData":
        return CompositionData(self, seed, device)


class HeadCompositionTaskConfig(Task, kind="head-composition"):
    """Questions that need two heads in sequence (DCMHA section 4.3), with accuracies by task."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    takes = (Questions,)
    predicts = ("probabilities", "vocabulary")

    def metrics(self, signature: Questions) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy"),
            percent("trained", "accuracy on trained tasks"),
            percent("held-out", "accuracy on held-out tasks"),
            MetricInfo("loss", "loss (nats)"),
            *(percent(name, f"accuracy on {name}") for name in signature.tasks),
        )

    def build(
        self, network: Any, data: Any, loss: Any, optimizer: Any, rate: Any
    ) -> "HeadComposition":
        return HeadComposition(network, data, optimizer, rate)


class Lexicon:
    """Result of each transformation of every entity, and the ids of all tokens."""

    def __init__(self) -> None:
        count = ENTITIES
        drawn = numpy_generator(FIXED, "lexicon", count)
        self.members = drawn.permutation(count).reshape(CLASSES, -1)
        self.first_class = count
        first_capability = count + CLASSES
        self.first_pattern = first_capability + CAPABILITIES
        self.first_transformation = self.first_pattern + len(PATTERNS)
        self.blank = self.first_transformation + len(TRANSFORMATIONS)
        self.maps = np.zeros((len(TRANSFORMATIONS), count), dtype=np.int64)
        row = {name: number for number, name in enumerate(TRANSFORMATIONS)}
        self.maps[row["copy"]] = np.arange(count)
        for number, members in enumerate(self.members):
            self.maps[row["class"], members] = self.first_class + number
        capabilities = drawn.permutation(count) % CAPABILITIES
        self.maps[row["capability"]] = first_capability + capabilities
        pairs = drawn.permutation(count).reshape(2, -1)
        self.maps[row["opposite"], pairs] = pairs[::-1]
        order = drawn.permutation(count)
        self.maps[row["previous"], order] = np.roll(order, 1)

    def ask(self, drawn: np.random.Generator, tasks: Ids) -> tuple[Ids, Ids]:
        """Return tokens (B, n) and answers (B,) of one question for each of `tasks` (B,)."""
        size = len(tasks)
        patterns, transformations = np.divmod(tasks, len(TRANSFORMATIONS))
        entities = draw_orders(drawn, size, ENTITIES)
        keys = entities[:, :FACTS]
        values = entities[:, FACTS : 2 * FACTS]
        # Every fact has its role: the source of the answer, and two others.
        place = drawn.integers(FACTS, size=size)
        first = (place + 1) % FACTS
        second = (place + 2) % FACTS
        groups = draw_orders(drawn, size, CLASSES)
        within = draw_orders(drawn, size, self.members.shape[1])

        def rows(pattern: str) -> Ids:
            return np.flatnonzero(patterns == PATTERNS.index(pattern))

        items = np.full(size, self.blank)
        at = rows("same-key")
        items[at] = keys[at, place[at]]
        at = rows("other-key")
        items[at] = keys[at, first[at]]
        keys[at, second[at]] = items[at]
        at = rows("same-value")
        items[at] = values[at, place[at]]
        at = rows("different")
        values[at, second[at]] = values[at, first[at]]
        at = rows("other-class")
        named = groups[at, 0]
        other = groups[at, 1]
        items[at] = self.first_class + named
        values[at, first[at]] = self.members[named, within[at, 0]]
        values[at, second[at]] = self.members[named, within[at, 1]]
        values[at, place[at]] = self.members[other, within[at, 0]]

        sources = values[np.arange(size), place]
        at = rows("same-value")
        sources[at] = keys[at, place[at]]
        facts = np.stack([keys, values], axis=2).reshape(size, 2 * FACTS)
        pattern_ids = self.first_pattern + patterns
        transformation_ids = self.first_transformation + transformations
        query = np.stack([items, pattern_ids, transformation_ids], axis=1)
        tokens = np.concatenate([facts, query], axis=1)
        return tokens, self.maps[transformations, sources]


def draw_orders(drawn: np.random.Generator, size: int, count: int) -> Ids:
    """Return `size` independent orders of the numbers below `count`: (size, count)."""
    return drawn.permuted(np.tile(np.arange(count), (size, 1)), axis=1)


class CompositionData(TokenDataModule):
    """Data module with batches of tokens, answers and tasks; the splits are "val" and "test"."""

    def __init__(self, data: HeadCompositionConfig, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        self.data = data
        self.lexicon = Lexicon()
        self.splits = ["val", "test"]
        self.steps_per_epoch = data.epoch_steps
        self.trained = np.setdiff1d(np.arange(TASKS), HELD_OUT)
        # Tasks take turns, so that a few batches contain all of them.
        tasks = np.tile(np.arange(TASKS), data.eval_questions)
        self.questions: dict[str, tuple[Ids, Ids, Ids]] = {}
        for split in self.splits:
            drawn = numpy_generator(FIXED, split, 0)
            tokens, answers = self.lexicon.ask(drawn, tasks)
            self.questions[split] = (tokens, answers, tasks)

    def fingerprint(self) -> str:
        # The evaluated questions show the complete lexicon.
        return digest(array for split in self.splits for array in self.questions[split])

    def batch(self, step: int) -> Batch:
        drawn = numpy_generator(self.seed, "batch", step)
        tasks = drawn.choice(self.trained, self.batch_size)
        tokens, answers = self.lexicon.ask(drawn, tasks)
        return self.tensors(self.share(tokens), self.share(answers), self.share(tasks))

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        questions = self.questions[split]

        def collate(places: range, rows: int) -> Batch:
            tokens, answers, tasks = (part[places.start : places.stop] for part in questions)
            missing = rows - len(answers)
            tokens = np.pad(tokens, ((0, missing), (0, 0)))
            answers = np.pad(answers, (0, missing), constant_values=IGNORED)
            return self.tensors(tokens, answers, np.pad(tasks, (0, missing)))

        return self.padded_loader(range(len(questions[1])), collate)


class HeadComposition(TaskModule):
    """Cross-entropy of the token after a question."""

    def build_metrics(self, split: str) -> "Grid":
        return Grid(self.data.signature.tasks, self.data.signature.held_out)

    def metric_names(self, split: str) -> list[str]:
        return ["accuracy", "trained", "held-out", "loss", *self.data.signature.tasks]

    def loss(self, batch: Any) -> Tensor:
        tokens, answers, _ = batch
        return F.cross_entropy(self._logits(tokens), answers)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return logits of the answer, the answers and the tasks."""
        tokens, answers, tasks = batch
        return self._logits(tokens), answers, tasks

    def unit_values(self, *arguments: Tensor) -> Tensor:
        logits, answers, _ = arguments
        losses = F.cross_entropy(logits, answers, ignore_index=IGNORED, reduction="none")
        correct = (logits.argmax(-1) == answers).float()
        return torch.stack([losses, (answers != IGNORED).float(), correct], dim=1)

    def predictions(self, batch: Any, evaluated: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return probabilities (N, vocabulary) and the N answers that are not padding."""
        logits, answers, _ = evaluated
        is_answered = answers != IGNORED
        probabilities = logits[is_answered].softmax(-1)
        return probabilities[:, : self.data.signature.vocabulary], answers[is_answered]

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)[:, -1].float()
        return logits


class Grid(Metric):
    """Loss and accuracy of all questions, and accuracies of trained, held-out and single tasks.

    A group of tasks without a question has no accuracy.
    """

    total: Tensor
    correct: Tensor
    questions: Tensor

    def __init__(self, tasks: tuple[str, ...], held_out: tuple[int, ...]) -> None:
        super().__init__()
        self.tasks = tasks
        self.held_out = torch.tensor(held_out, dtype=torch.long)
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        zeros = torch.zeros(len(tasks), dtype=torch.float64)
        self.add_state("correct", zeros, dist_reduce_fx="sum")
        self.add_state("questions", zeros.clone(), dist_reduce_fx="sum")

    def update(self, logits: Tensor, answers: Tensor, tasks: Tensor) -> None:
        """Add logits (B, V), answers (B,), IGNORED in padding rows, and tasks (B,)."""
        self.total += F.cross_entropy(
            logits, answers, ignore_index=IGNORED, reduction="sum"
        ).double()
        self.questions.index_add_(0, tasks, (answers != IGNORED).double())
        self.correct.index_add_(0, tasks, (logits.argmax(-1) == answers).double())

    def compute(self) -> dict[str, Tensor]:
        held_out = torch.zeros_like(self.questions, dtype=torch.bool)
        held_out[self.held_out] = True
        groups = {"accuracy": torch.ones_like(held_out), "trained": ~held_out, "held-out": held_out}
        for number, name in enumerate(self.tasks):
            groups[name] = torch.arange(len(held_out), device=held_out.device) == number
        values = {"loss": self.total / self.questions.sum()}
        for name, group in groups.items():
            if self.questions[group].sum() > 0:
                values[name] = self.correct[group].sum() / self.questions[group].sum()
        return values
