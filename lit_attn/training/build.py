"""From a cell to what Lightning trains: the data, the task, and what the model costs."""

from typing import NamedTuple

import lightning as L
import torch

from lit_attn.cells.records import Metric
from lit_attn.config.cell import Cell
from lit_attn.config.data.base import Data
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.config.data.composition import HeadCompositionConfig
from lit_attn.config.data.images import Images
from lit_attn.config.data.labelled import Labelled
from lit_attn.config.data.segmentation import Scenery
from lit_attn.config.data.text import Tokens
from lit_attn.config.experiment import Experiment
from lit_attn.data import composition
from lit_attn.data.ade20k import SceneryData
from lit_attn.data.image_folder import ImageFolderData
from lit_attn.data.images import ImageData
from lit_attn.data.module import TokenDataModule
from lit_attn.data.text.batches import TextData
from lit_attn.data.text.labelled import LabelledData
from lit_attn.models import budget
from lit_attn.models.gpt import GPT
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.tasks.base import Task
from lit_attn.tasks.classification import Classification, SequenceClassification
from lit_attn.tasks.composition import HeadComposition
from lit_attn.tasks.language import LanguageModelling
from lit_attn.tasks.segmentation import Segmentation

AnyData = (
    ImageData
    | ImageFolderData
    | TextData
    | LabelledData
    | composition.CompositionData
    | SceneryData
)


class Parts(NamedTuple):
    """`accumulate` is the micro-batches of a step, `tokens` those of a sample, if it has tokens."""

    data: AnyData
    task: Task
    costs: budget.Budget
    accumulate: int
    tokens: int | None


def build(cell: Cell, device: torch.device) -> Parts:
    """Everything of a cell that depends on its task. Raises ConfigError for what cannot run."""
    experiment = cell.experiment
    model = budget.resolve(experiment.model, cell.match_to, experiment.data)
    costs = budget.describe(model, experiment.data)
    L.seed_everything(cell.seed, verbose=False)
    data = data_module(experiment.data, cell.seed, device)
    task = _task(experiment.model_copy(update={"model": model}), data)
    epochs = experiment.training.epochs
    task.momentum = experiment.schedule.momentum(data.steps_per_epoch, epochs)
    if experiment.training.ema is not None:
        task.average_weights(experiment.training.ema)
    _measured(cell.metric, task)
    if experiment.training.compile:
        task.compile_network()
    if isinstance(data, TokenDataModule):
        return Parts(data, task, costs, data.accumulate, data.tokens_per_sample)
    return Parts(data, task, costs, accumulate=1, tokens=None)


def _measured(metric: Metric, task: Task) -> None:
    """Raise ConfigError, before training and not after, where nothing is what the metric is of."""
    split, _, name = metric.name.partition("/")
    splits = task.splits
    if split not in ("train", "evaluation", *splits):
        raise ConfigError(f"metric: '{metric.name}': this data has {', '.join(splits)} to measure")
    if metric.selection == "best-validation" and "val" not in splits:
        raise ConfigError(f"metric: best-validation needs 'val/{name}', this data has no val")
    if split not in splits:
        return
    if metric.averaged and task.average is None:
        raise ConfigError(f"metric: '{metric.name}' is of averaged weights; set training.ema")
    bare, names = name.removeprefix("ema-"), task.names_of(split)
    if bare not in names:
        raise ConfigError(
            f"metric: '{metric.name}': '{bare}' is not measured{suggest(bare, names)}"
        )


def data_module(data: Data, seed: int, device: torch.device) -> AnyData:
    """The batches and splits of `data`; ConfigError where it cannot be had."""
    if isinstance(data, Tokens):
        return TextData(data, seed, device)
    if isinstance(data, Labelled):
        return LabelledData(data, seed, device)
    if isinstance(data, HeadCompositionConfig):
        return composition.CompositionData(data, seed, device)
    if isinstance(data, ClassFolders):
        return ImageFolderData(data, seed, device)
    if isinstance(data, Scenery):
        return SceneryData(data, seed, device)
    assert isinstance(data, Images)
    return ImageData(data, seed, device)


def _task(experiment: Experiment, data: AnyData) -> Task:
    network = budget.build(experiment.model, experiment.data)
    optimizer, training = experiment.optimizer, experiment.training
    rate = experiment.schedule.rate(optimizer.lr, data.steps_per_epoch, training.epochs)
    if isinstance(data, TextData):
        assert isinstance(network, GPT)
        text = {split: data.text_measure(split) for split in data.splits}
        return LanguageModelling(network, data.splits, optimizer, rate, text)
    if isinstance(data, composition.CompositionData):
        assert isinstance(network, GPT)
        held_out = composition.held_out(data.data).tolist()
        return HeadComposition(network, data.splits, optimizer, rate, held_out)
    if isinstance(data, SceneryData):
        return Segmentation(network, data.splits, optimizer, rate, data.classes)
    of = SequenceClassification if isinstance(data, LabelledData) else Classification
    return of(
        network,
        data.splits,
        optimizer,
        rate,
        data.data.num_classes,
        experiment.loss.build(),
    )
