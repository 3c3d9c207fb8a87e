"""One experiment: everything a cell needs but the variant and the seed."""

import math
from typing import Literal, NamedTuple, TypeVar

from pydantic import ValidationInfo, field_validator

from lit_attn.config.data.base import Data
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.config.data.composition import HeadCompositionConfig
from lit_attn.config.data.images import Images
from lit_attn.config.data.labelled import Labelled
from lit_attn.config.data.segmentation import Scenery
from lit_attn.config.data.text import Tokens
from lit_attn.config.losses import CrossEntropyLoss, Loss
from lit_attn.config.models.base import Model
from lit_attn.config.models.imagenet import ImageViTConfig, JiTConfig, LocalViTConfig, Transformer
from lit_attn.config.models.language import GPTConfig, SequenceClassifierConfig
from lit_attn.config.models.segmenter import SegmenterConfig
from lit_attn.config.models.vit import ViTConfig
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Constant, Schedule
from lit_attn.config.training import Training
from lit_attn.schema.base import Config
from lit_attn.schema.errors import find_nearest_divisor

Part = TypeVar("Part", Data, Model)


class Needs(NamedTuple):
    """The data and the models that a task is for."""

    data: tuple[type[Data], ...]
    model: tuple[type[Model], ...]


TASKS = {
    "image-classification": Needs(
        (Images, ClassFolders), (ViTConfig, ImageViTConfig, LocalViTConfig, JiTConfig)
    ),
    "language-modelling": Needs((Tokens,), (GPTConfig,)),
    "sequence-classification": Needs((Labelled,), (SequenceClassifierConfig,)),
    "head-composition": Needs((HeadCompositionConfig,), (GPTConfig,)),
    "segmentation": Needs((Scenery,), (SegmenterConfig,)),
}


class Experiment(Config):
    """A data set, a model, a recipe: `experiments/*.yaml` hold one each."""

    task: Literal[
        "image-classification",
        "language-modelling",
        "sequence-classification",
        "head-composition",
        "segmentation",
    ] = "image-classification"
    data: Data
    model: Model
    loss: Loss = CrossEntropyLoss()
    optimizer: Optimizer
    schedule: Schedule = Constant()
    training: Training

    @field_validator("data", "model")
    @classmethod
    def _of_the_task(cls, part: Part, info: ValidationInfo) -> Part:
        task = info.data.get("task")
        if task is None or info.field_name is None:
            return part
        classes = getattr(TASKS[task], info.field_name)
        if not isinstance(part, classes):
            family = Data.family if isinstance(part, Data) else Model.family
            kinds = [kind for kind, member in family.items() if issubclass(member, classes)]
            raise ValueError(
                f"'{part.kind}' does not go with `task: {task}`; choose from {', '.join(kinds)}"
            )
        return part

    @field_validator("model")
    @classmethod
    def _of_every_size(cls, model: Model, info: ValidationInfo) -> Model:
        data = info.data.get("data")
        grows = isinstance(data, ClassFolders) and data.sizes
        if grows and not isinstance(model, ImageViTConfig | LocalViTConfig):
            raise ValueError(
                f"'{model.kind}' has positions for images of one size, not `data.sizes`"
            )
        return model

    @field_validator("model")
    @classmethod
    def _patches_tile(cls, model: Model, info: ValidationInfo) -> Model:
        data = info.data.get("data")
        if not isinstance(model, ViTConfig | Transformer):
            return model
        sizes: tuple[int, ...] = ()
        if isinstance(data, Images):
            sizes = data.image_shape[1:2]
        elif isinstance(data, ClassFolders):
            sizes = (data.size, *data.sizes)
        elif isinstance(data, Scenery):
            sizes = (data.crop,)
        of, key = ("windows", " (data.crop)") if isinstance(data, Scenery) else ("images", "")
        for size in sizes:
            if size % model.patch:
                raise ValueError(
                    f"patch: patches of {model.patch} do not tile {of} of {size} x {size}{key}; "
                    f"the nearest that do are of {find_nearest_divisor(model.patch, size)}"
                )
        return model

    @field_validator("model")
    @classmethod
    def _no_gaps(cls, model: Model, info: ValidationInfo) -> Model:
        data = info.data.get("data")
        if not isinstance(data, Scenery) or not isinstance(model, SegmenterConfig):
            return model
        if model.stride is not None and model.stride > data.crop:
            raise ValueError(
                f"stride: {model.stride} leaves gaps between windows of {data.crop} (data.crop); "
                f"{data.crop} at most"
            )
        return model

    @field_validator("model")
    @classmethod
    def _a_weight_for_every_key(cls, model: Model, info: ValidationInfo) -> Model:
        data, limit = info.data.get("data"), model.attention.similarity.max_tokens
        if limit is not None and isinstance(data, Tokens | Labelled) and limit < data.context:
            raise ValueError(
                f"attention.similarity.positions: {limit} are fewer than the "
                f"{data.context} tokens of data.context"
            )
        return model

    @field_validator("model")
    @classmethod
    def _cutoffs_are_ids(cls, model: Model, info: ValidationInfo) -> Model:
        data = info.data.get("data")
        if isinstance(data, Tokens) and isinstance(model, GPTConfig) and model.cutoffs:
            vocabulary = data.tokenizer.vocabulary
            if model.cutoffs[-1] >= vocabulary:
                raise ValueError(
                    f"cutoffs: {model.cutoffs[-1]} is beyond the vocabulary of {vocabulary}; "
                    f"{vocabulary - 1} at most"
                )
        return model

    @field_validator("training")
    @classmethod
    def _longer_than_its_ramps(cls, training: Training, info: ValidationInfo) -> Training:
        schedule = info.data.get("schedule")
        ramps = {} if schedule is None else schedule.ramps()
        if (needed := sum(ramps.values())) > training.epochs:
            said = " + ".join(f"schedule.{name}" for name in ramps)
            raise ValueError(
                f"epochs: {training.epochs}, and {said} takes {needed:g}; the fewest that will do "
                f"are {math.ceil(needed)} (training.max_steps stops a trial before its last epoch)"
            )
        return training

    @field_validator("training")
    @classmethod
    def _devices_share_a_batch(cls, training: Training, info: ValidationInfo) -> Training:
        data = info.data.get("data")
        if data is None:
            return training
        parts = isinstance(data, Tokens | Labelled | HeadCompositionConfig)
        accumulate = data.accumulate if parts else 1
        if (data.batch_size // accumulate) % training.devices:
            of = f" in {accumulate} parts" if accumulate > 1 else ""
            raise ValueError(
                f"devices: {training.devices} cannot share a batch of {data.batch_size}{of} evenly"
            )
        return training
