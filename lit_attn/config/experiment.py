"""One experiment: everything a cell needs but the variant and the seed."""

from typing import Literal

from lit_attn.config.base import Config
from lit_attn.config.data import Data, Loss
from lit_attn.config.model import Model
from lit_attn.config.training import Constant, Optimizer, Schedule, Training


class Experiment(Config):
    """A data set, a model, a recipe: `experiments/*.yaml` hold one each."""

    task: Literal["image-classification"] = "image-classification"
    data: Data
    model: Model
    loss: Loss = Loss()
    optimizer: Optimizer
    schedule: Schedule = Constant()
    training: Training
