"""Data for head composition: patterns times transformations (DCMHA section 4.3)."""

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from lit_attn.config.data.base import TokenData, method
from lit_attn.config.signatures import Questions

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


class HeadCompositionConfig(TokenData):
    """Questions on three facts; each pattern with each transformation is one task.

    DCMHA asks trained language models 74 such tasks in words ("John has an apple. Mary has a dog.
    So John has a kind of ..."). Here entities are symbols, tokens name pattern and transformation,
    and the model is trained on the questions. The five tasks on the diagonal of the grid are not
    trained, so the model meets their two halves only in other tasks.

    An epoch is `epoch_steps` steps of new questions. Evaluated questions are equal for all seeds.
    """

    kind: Literal["head-composition"] = "head-composition"
    context: ClassVar = CONTEXT
    batch_size: PositiveInt = Field(128, description="questions of a step, over all devices")
    epoch_steps: PositiveInt = Field(100, description="training steps of an epoch")
    eval_batch_size: PositiveInt = Field(512, description="questions of an evaluation batch")
    eval_questions: PositiveInt = Field(80, description="evaluation questions of a task in a split")

    def signature(self) -> Questions:
        return Questions(VOCABULARY, CONTEXT, TASK_NAMES, HELD_OUT)

    build: ClassVar = method("lit_attn.data.composition:CompositionData")
