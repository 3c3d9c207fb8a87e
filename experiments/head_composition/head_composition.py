"""Plug-in for head composition: questions whose answer needs two heads in sequence.

The study `dcmha-synthetic` names this file under `parts`. It adds data, a kind of sample and a
task; their torch code is in head_composition_questions.py, which a cell imports when it is built.

Source: DCMHA (arXiv:2405.08553), section 4.3 and Table 11 (docs/setups.md, section 11).
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, PositiveInt

from lit_attn.data.base import TokenData, method
from lit_attn.signatures import CausalTokens
from lit_attn.tasks.task import MetricInfo, Task, percent

# Patterns: how the query finds its source (the QK circuit of a head).
PATTERNS = ("same-key", "other-key", "same-value", "different", "other-class")

# Transformations: how the answer follows from the source (the OV circuit of a head).
TRANSFORMATIONS = ("copy", "class", "capability", "opposite", "previous")

# Names of the tasks; task t has pattern t // 5 and transformation t % 5.
TASK_NAMES = tuple(f"{pattern}:{change}" for pattern in PATTERNS for change in TRANSFORMATIONS)

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

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    context: ClassVar = CONTEXT
    batch_size: PositiveInt = Field(128, description="questions of a step, over all devices")
    epoch_steps: PositiveInt = Field(100, description="training steps of an epoch")
    eval_batch_size: PositiveInt = Field(512, description="questions of an evaluation batch")
    eval_questions: PositiveInt = Field(
        80, description="evaluation questions of each task in each split"
    )

    def signature(self) -> Questions:
        return Questions(VOCABULARY, CONTEXT, TASK_NAMES, HELD_OUT)

    build: ClassVar = method("head_composition_questions:CompositionData")


class HeadCompositionTaskConfig(Task, kind="head-composition"):
    """Questions that need two heads in sequence (DCMHA section 4.3), with accuracies by task."""

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    takes = (Questions,)
    module = "head_composition_questions:HeadComposition"
    predicts = ("probabilities", "vocabulary")

    def metrics(self, signature: Questions) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy"),
            percent("trained", "accuracy on trained tasks"),
            percent("held-out", "accuracy on held-out tasks"),
            MetricInfo("loss", "loss (nats)"),
            *(percent(name, f"accuracy on {name}") for name in signature.tasks),
        )
