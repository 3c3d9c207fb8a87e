"""Data for head composition: what to look up times what to do with it (DCMHA section 4.3)."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from lit_attn.config.data.base import Data
from lit_attn.schema.base import outside_identity

# How the query finds its source, which is a head's QK circuit.
PATTERNS = ("same-key", "other-key", "same-value", "different", "other-class")

# What the source becomes, which is a head's OV circuit.
TRANSFORMATIONS = ("copy", "class", "capability", "opposite", "previous")

# The grid: task t is pattern t // 5 and transformation t % 5.
TASK_NAMES = tuple(f"{pattern}:{change}" for pattern in PATTERNS for change in TRANSFORMATIONS)

# Three facts of a key and a value each; then the query's item, pattern and transformation.
FACTS = 3
CONTEXT = 2 * FACTS + 3


class HeadCompositionConfig(Data):
    """Questions on three facts, one kind for each pattern and transformation of a grid.

    DCMHA asks trained language models 74 such tasks in words ("John has an apple. Mary has a dog.
    So John has a kind of ..."). Here entities are symbols, pattern and transformation are named by
    tokens, and the model is trained on the questions: on all of the grid, or, `held_out: diagonal`,
    without the five tasks on its diagonal, each of whose two parts it has then met apart alone.

    An epoch is `epoch_steps` steps of new questions; the evaluated ones are the same for all seeds.
    """

    kind: Literal["head-composition"] = "head-composition"
    batch_size: PositiveInt = Field(128, description="questions of a step, over all devices")
    entities: PositiveInt = 16
    classes: int = Field(4, ge=2)
    capabilities: int = Field(4, ge=2)
    held_out: Literal["none", "diagonal"] = "diagonal"
    epoch_steps: PositiveInt = 100
    eval_questions: PositiveInt = Field(80, description="of each task, in each split")
    accumulate: PositiveInt = outside_identity(1, "micro-batches of a step, to save memory")

    @property
    def context(self) -> int:
        """Tokens of a question."""
        return CONTEXT

    @property
    def vocabulary(self) -> int:
        """Entities, classes, capabilities, patterns, transformations, and one that says nothing."""
        names = len(PATTERNS) + len(TRANSFORMATIONS)
        return self.entities + self.classes + self.capabilities + names + 1

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.entities % 2:
            raise ValueError(f"entities: {self.entities} cannot all have an opposite")
        if self.entities % self.classes or self.entities < 2 * self.classes:
            raise ValueError(
                f"entities: {self.entities} are not {self.classes} classes of the same size, two "
                "or more"
            )
        if self.entities < 2 * FACTS:
            raise ValueError(f"entities: {2 * FACTS} stand in a question, at least")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: {self.accumulate} does not divide the batch of {self.batch_size}"
            )
        return self
