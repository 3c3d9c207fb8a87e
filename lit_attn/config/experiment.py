"""Experiment: all choices of a cell except the variant's name and the seed."""

import math
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

# Importing these modules registers the members of the families.
from lit_attn.config.data import class_folders, composition, images, labelled, segmentation, text
from lit_attn.config.data.base import Data
from lit_attn.config.losses import CrossEntropyLoss, Loss
from lit_attn.config.models import language, segmenter, vision
from lit_attn.config.models.base import Model
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Constant, Schedule
from lit_attn.config.tasks import ImageClassificationConfig, Task
from lit_attn.config.training import Training
from lit_attn.schema.base import Config

MEMBERS = (
    *(class_folders, composition, images, labelled, segmentation, text),
    *(vision, language, segmenter),
)
"""Modules with the data sets and models of this package."""


class Experiment(Config):
    """A task, a data set, a model and a recipe; each file of `experiments/` holds one.

    What goes with what follows from signatures (lit_attn.config.signatures): the task and the model
    must take the signature of the data, and the model checks its own conditions on it.
    """

    task: Task = Field(
        ImageClassificationConfig(),
        description="objective and metrics; decides which data and models fit",
    )
    data: Data = Field(description="data set")
    model: Model = Field(description="network")
    loss: Loss = Field(CrossEntropyLoss(), description="loss of the classification tasks")
    optimizer: Optimizer = Field(description="optimiser")
    schedule: Schedule = Field(Constant(), description="learning rate over training")
    training: Training = Field(description="length, precision and devices of the training")

    def identity(self) -> dict[str, Any]:
        """Return the identity, with a task of default values as its kind alone.

        A task was a plain string before it had keys, and identities must not change.
        """
        identity = super().identity()
        if identity.get("task") == {"kind": self.task.kind}:
            return identity | {"task": self.task.kind}
        return identity

    @field_validator("data")
    @classmethod
    def _task_takes_data(cls, data: Data, info: ValidationInfo) -> Data:
        task: Task | None = info.data.get("task")
        if task is None or isinstance(data.signature(), task.takes):
            return data
        kinds = [kind for kind, member in Data.family.items() if fits(member, type(task))]
        tasks = [kind for kind, member in Task.family.items() if fits(type(data), member)]
        hint = f", or set {' or '.join(f'`task: {kind}`' for kind in tasks)}" if tasks else ""
        raise ValueError(
            f"'{data.kind}' does not go with `task: {task.kind}`; choose from "
            f"{', '.join(sorted(kinds))}{hint}"
        )

    @field_validator("model")
    @classmethod
    def _model_takes_data(cls, model: Model, info: ValidationInfo) -> Model:
        data: Data | None = info.data.get("data")
        if data is None:
            return model
        signature = data.signature()
        if not isinstance(signature, model.takes):
            kinds = [kind for kind, member in Model.family.items() if fits(type(data), member)]
            raise ValueError(
                f"'{model.kind}' does not go with `data: {data.kind}`; choose from "
                f"{', '.join(sorted(kinds))}"
            )
        model.check(signature)
        return model

    @field_validator("training")
    @classmethod
    def _training_fits_schedule(cls, training: Training, info: ValidationInfo) -> Training:
        schedule: Schedule | None = info.data.get("schedule")
        ramps = {} if schedule is None else schedule.ramps()
        if (needed := sum(ramps.values())) > training.epochs:
            names = " + ".join(f"schedule.{name}" for name in ramps)
            raise ValueError(
                f"epochs: {training.epochs}, but {names} needs {needed:g}; choose at least "
                f"{math.ceil(needed)} (training.max_steps stops a trial before its last epoch)"
            )
        return training

    @field_validator("training")
    @classmethod
    def _devices_share_a_batch(cls, training: Training, info: ValidationInfo) -> Training:
        data: Data | None = info.data.get("data")
        if data is not None and (data.batch_size // data.micro_batches) % training.devices:
            parts = f" in {data.micro_batches} parts" if data.micro_batches > 1 else ""
            raise ValueError(
                f"devices: {training.devices} cannot share a batch of {data.batch_size}{parts} "
                "evenly"
            )
        return training


def fits(data: Any, other: Any) -> bool:
    """Return True if a class of data goes with a class of models or of tasks."""
    return issubclass(data.signature_type(), other.takes)
