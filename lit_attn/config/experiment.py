"""Experiment: all choices of a cell except the variant's name and the seed."""

import math
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lit_attn.config.training import Training
from lit_attn.data.base import Data
from lit_attn.models import block_checks, own_trial
from lit_attn.models.base import Model, find_mixers, find_specs
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Constant, Schedule
from lit_attn.schema.base import Config, Kind, consistency_check, load, trial
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure, find_last_return, find_user_line
from lit_attn.schema.trust import is_foreign_file_open
from lit_attn.signatures import Signature
from lit_attn.tasks.metrics import AddedMetric, MetricChoice
from lit_attn.tasks.task import CrossEntropyLoss, ImageClassificationConfig, Loss, Task

PACKAGES = ("data", "models", "optim", "replace", "segmentation")
"""Packages whose constant MEMBERS names the modules that register members of the families."""


def import_members() -> None:
    """Import every module of lit_attn that registers members of the families."""
    for package in PACKAGES:
        for name in load(f"lit_attn.{package}:MEMBERS"):
            import_module(f"lit_attn.{package}.{name}")


import_members()


class Experiment(Config):
    """A task, a data set, a model and a recipe; each file of `experiments/` holds one.

    Signatures (lit_attn.signatures) decide which of them fit together: the task and the
    model must take the signature of the data, and the model checks its own conditions on it.
    """

    task: Task = Field(
        ImageClassificationConfig(),
        description="objective and metrics; decides which data and models fit",
    )
    data: Data = Field(description="data set")
    model: Model = Field(description="network")
    loss: Loss = Field(CrossEntropyLoss(), description="loss of the classification tasks")
    metrics: tuple[AddedMetric, ...] = Field((), description="metrics beside those of the task")
    optimizer: Optimizer = Field(description="optimiser")
    schedule: Schedule = Field(Constant(), description="learning rate over training")
    training: Training = Field(description="length, precision and devices of the training")

    @model_validator(mode="before")
    @classmethod
    def _task_follows_from_data(cls, written: Any) -> Any:
        """Choose the only task that takes the data if none is written and the default does not."""
        if not isinstance(written, Mapping) or "task" in written:
            return written
        data = written.get("data")
        kind = data.get("kind") if isinstance(data, Mapping) else data
        member: Any = Data.family.get(kind) if isinstance(kind, str) else None
        if isinstance(data, Data):
            member = type(data)
        if member is None or is_fit(member, ImageClassificationConfig):
            return written
        tasks = []
        for name, task in Task.family.items():
            if not task.runs_foreign_code and is_fit(member, task):
                tasks.append(name)
        return {**written, "task": tasks[0]} if len(tasks) == 1 else written

    def input_paths(self) -> list[Path]:
        """Return the files and folders of the data, and the file of the weights to start with."""
        paths = list(self.data.input_paths())
        if self.training.weights is not None:
            paths.append(self.training.weights.path)
        return paths

    def identity(self) -> dict[str, Any]:
        """Return the identity, with a task of default values as its kind alone.

        A task was a plain string before it had keys, and identities must not change. The parameters
        that the rule of weight decay exempts, and that earlier versions decayed, are named, and so
        is causal order, if a bias depends on it.
        """
        # A copy, because the identity of the base class is cached.
        identity = dict(super().identity())
        rule = getattr(self.optimizer, "decay", "all")
        exempt = find_exempt(self.model, rule)
        if exempt:
            identity["no_weight_decay"] = exempt
        # T5's bias had the buckets of an encoder in causal order too.
        follows_order = any(spec.follows_order for spec in self.model.attention.mechanisms)
        if follows_order and self.data.signature().is_ordered:
            identity["order"] = "causal"
        if identity.get("task") == {"kind": self.task.kind}:
            identity["task"] = self.task.kind
        return identity

    @trial
    def _outside_members_work(self) -> None:
        """Try out every member that needs code from outside the package."""
        for name, value in self:
            if not isinstance(value, Kind) or not value.needs_foreign_code:
                continue
            # A task from outside the package may need another output of the network.
            is_output_checked = name == "model" and not self.task.needs_foreign_code
            signature = self.data.signature()
            failure = _try_member(
                type(value), value.model_dump_json(), signature, is_output_checked
            )
            if failure:
                raise ValueError(f"{name}: {failure}")

    @trial
    def _callbacks_work(self) -> None:
        """Build every callback, and refuse those that cannot run in a cell."""
        signature = self.data.signature()
        for callback in self.training.callbacks:
            failure = _try_member(type(callback), callback.model_dump_json(), signature, False)
            if failure:
                raise ValueError(f"training.callbacks: {failure}")

    @trial
    def _own_layers_work(self) -> None:
        """Try out the layers of users, and layers with parts of users (docs/mixers.md).

        Layers that need a GPU are tried out later, by the process that may use one.
        """
        mixers = find_mixers(self.model)
        on_gpu = [mixer.target for mixer in mixers if mixer.needs_gpu]
        if on_gpu and self.training.accelerator == "cpu":
            raise ValueError(f"training.accelerator: {on_gpu[0]} needs a GPU; write auto or cuda")
        if not own_trial.has_own_layers(self.model):
            return
        failure = _try_layers(
            type(self.model),
            self.model.model_dump_json(),
            self.data.signature(),
            self.training.precision,
        )
        if failure:
            raise ValueError(f"model: {failure}")

    @consistency_check
    def _records_steps(self) -> None:
        """Refuse `compile: step` for steps that a CUDA graph cannot replay.

        A graph has fixed shapes, and keeps the numbers that it was recorded with.
        """
        if self.training.compile != "step":
            return
        refusals = self._list_unrecordable()
        if refusals:
            raise ValueError(f"training.compile: step {refusals[0]}. Write auto or blocks.")

    def _list_unrecordable(self) -> list[str]:
        """Return what a record of whole steps would freeze or leave out, as ends of sentences."""
        endings = []
        if not self.data.signature().has_fixed_shapes:
            endings.append(
                "needs training batches of one shape, but those of data.kind "
                f"'{self.data.kind}' differ in shape"
            )
        if self.data.micro_batches > 1:
            endings.append(
                f"needs steps of one micro-batch, and this data has {self.data.micro_batches}"
            )
        if self.training.is_distributed:
            endings.append(f"needs one device, and training.devices is {self.training.devices}")
        if not self.task.is_recordable:
            endings.append(f"does not record the steps of task '{self.task.kind}'")
        if not self.optimizer.is_recordable:
            members: dict[str, Any] = dict(self.optimizer.family)
            kinds = [kind for kind, member in members.items() if member.is_recordable]
            endings.append(
                f"needs one of the optimizers {', '.join(kinds)}, because a step of "
                f"'{self.optimizer.kind}' has numbers that a record would keep"
            )
        momentum = self.schedule.momentum(1, 1)
        decay = self.schedule.weight_decay(1, 1)
        if momentum is not None or decay is not None:
            endings.append(
                f"records a constant momentum and weight decay, which schedule "
                f"'{self.schedule.kind}' changes in each step"
            )
        if self.training.precision == "fp16":
            endings.append("does not record the loss scale of precision fp16; bf16 has none")
        if self.training.callbacks:
            endings.append("does not call the hooks of training.callbacks within a step")
        return endings

    @trial
    def _trains_by_blocks(self) -> None:
        """Refuse FSDP and recomputation for what they cannot train."""
        training = self.training
        is_recomputed = training.recompute == "blocks"
        if training.is_sharded and not self.optimizer.takes_shards:
            raise ValueError(
                f"training.strategy: fsdp: '{self.optimizer.kind}' does not take sharded "
                "parameters; choose another optimizer, or write ddp"
            )
        if not training.is_sharded and not is_recomputed:
            return
        failure = _try_blocks(
            type(self.model),
            self.model.model_dump_json(),
            self.data.signature(),
            training.is_sharded,
            is_recomputed,
        )
        if failure:
            raise ValueError(failure)

    @trial
    def _measures_stopping(self) -> None:
        """Refuse early stopping by a metric that is not measured on validation data."""
        stop = self.training.stop
        if stop is None:
            return
        if "val" not in self.data.splits:
            raise ValueError("training.stop: needs a validation split: set data.validation")
        try:
            MetricChoice(name=stop.metric).resolve(self)
        except ValueError as error:
            raise ValueError(f"training.stop.metric: {error}") from error

    @field_validator("data")
    @classmethod
    def _task_takes_data(cls, data: Data, info: ValidationInfo) -> Data:
        """Refuse data that the task does not take."""
        task: Task | None = info.data.get("task")
        if task is None or isinstance(data.signature(), task.takes):
            return data
        data_kinds = [kind for kind, member in Data.family.items() if is_fit(member, type(task))]
        tasks = []
        for kind, member in Task.family.items():
            if is_fit(type(data), member):
                tasks.append(f"`task: {kind}`")
        raise ValueError(
            f"'{data.kind}' does not go with `task: {task.kind}`;"
            f" choose from {', '.join(sorted(data_kinds))}, or set {' or '.join(tasks)}"
        )

    @field_validator("model")
    @classmethod
    def _model_takes_data(cls, model: Model, info: ValidationInfo) -> Model:
        """Refuse a model that does not take the data, or that fails its own check of them."""
        data: Data | None = info.data.get("data")
        if data is None:
            return model
        signature = data.signature()
        if not isinstance(signature, model.takes):
            kinds = [kind for kind, member in Model.family.items() if is_fit(type(data), member)]
            raise ValueError(
                f"'{model.kind}' does not go with `data: {data.kind}`;"
                f" choose from {', '.join(sorted(kinds))}"
            )
        model.check(signature)
        return model

    @field_validator("loss")
    @classmethod
    def _task_uses_loss(cls, loss: Loss, info: ValidationInfo) -> Loss:
        """Refuse a loss that is not the default if the task has its own."""
        task: Task | None = info.data.get("task")
        if task is not None and not task.uses_loss and loss != CrossEntropyLoss():
            raise ValueError(f"`task: {task.kind}` has a loss of its own; remove `loss`")
        return loss

    @field_validator("metrics")
    @classmethod
    def _metrics_fit_task(
        cls, metrics: tuple[AddedMetric, ...], info: ValidationInfo
    ) -> tuple[AddedMetric, ...]:
        """Refuse metrics that the task cannot measure, and names that occur twice."""
        task: Task | None = info.data.get("task")
        data: Data | None = info.data.get("data")
        if not metrics or task is None or data is None or is_foreign_file_open():
            return metrics
        signature = data.signature()
        names = [metric.name for metric in task.metrics(signature)]
        for metric in metrics:
            name = metric.info(task.outputs(signature)).name
            if name in names:
                raise ValueError(f"'{name}' is measured twice; set `record_as`")
            names.append(name)
        return metrics

    @field_validator("training")
    @classmethod
    def _training_fits_schedule_and_data(cls, training: Training, info: ValidationInfo) -> Training:
        """Refuse fewer epochs than the ramps take, and devices that cannot share a batch."""
        schedule: Schedule | None = info.data.get("schedule")
        if schedule is not None:
            ramps = schedule.ramps()
            needed_epochs = sum(ramps.values())
            if needed_epochs > training.epochs:
                names = " + ".join(f"schedule.{name}" for name in ramps)
                raise ValueError(
                    f"epochs: {training.epochs}, but {names} needs {needed_epochs:g};"
                    f" choose at least {math.ceil(needed_epochs)}"
                    " (training.max_steps stops a trial before its last epoch)"
                )
        data: Data | None = info.data.get("data")
        if data is not None:
            micro_batch_size = data.batch_size // data.micro_batches
            if micro_batch_size % training.devices:
                parts = f" in {data.micro_batches} parts" if data.micro_batches > 1 else ""
                raise ValueError(
                    f"devices: {training.devices} cannot share a batch of"
                    f" {data.batch_size}{parts} evenly"
                )
        return training


@cache
def _try_member(
    member: type[Kind], text: str, signature: Signature, is_output_checked: bool
) -> str:
    """Return why the member with the JSON `text` cannot be used, or an empty string."""
    try:
        output = member.model_validate_json(text).try_out(signature)
        if is_output_checked:
            signature.check_output(output)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        # Code from outside the package can raise any exception.
        place = f"class {member.__name__}"
        if not find_user_line(error):
            # A result of the user's code may have made other code fail.
            config = member.model_validate_json(text)
            result = find_last_return(lambda: config.try_out(signature))
            place = f"{result}; {place}" if result else place
        return explain_failure(error, place)
    return ""


@cache
def _try_layers(member: type[Model], text: str, signature: Signature, precision: str) -> str:
    """Return why a layer of a user in the model with the JSON `text` cannot be used, or ""."""
    try:
        own_trial.try_layers(member.model_validate_json(text), signature, precision)
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


@cache
def _try_blocks(
    member: type[Model], text: str, signature: Signature, is_sharded: bool, is_recomputed: bool
) -> str:
    """Return why the model with the JSON `text` cannot be trained block by block, or ""."""
    try:
        model = member.model_validate_json(text)
        block_checks.check_blocks(model, signature, is_sharded, is_recomputed)
    except ConfigError as error:
        return str(error)
    return ""


def find_exempt(model: Model, rule: str) -> list[str]:
    """Return the parameters of `model` that `decay: rule` exempts and earlier versions decayed."""
    if rule == "all":
        return []
    names: set[str] = set()
    if rule == "weights":
        names.update(model.exempt_parameters())
    for spec in find_specs(model):
        for mechanism in spec.mechanisms:
            for part in mechanism.parts.values():
                names.update(part.stacked_vectors())
                if rule == "weights":
                    names.update(part.exempt_parameters())
    return sorted(names)


def is_fit(data: Any, other: Any) -> bool:
    """Return True if a class of data goes with a class of models or of tasks."""
    signature_class = get_type_hints(data.signature)["return"]
    return issubclass(signature_class, other.takes)
