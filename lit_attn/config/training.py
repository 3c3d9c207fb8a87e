"""Optimisers, schedules, and how long and how precisely a cell trains."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.config.diagnostics import Diagnostics
from lit_attn.schema.base import Config, outside_identity


class Training(Config):
    """Length and precision of a cell's training; where its device and speed switches stand."""

    epochs: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip: PositiveFloat | None = Field(None, description="gradient norm")
    max_steps: PositiveInt | None = Field(None, description="stop after this many steps")
    evaluate_every: PositiveInt = Field(1, description="epochs between evaluations")
    ema: float | None = Field(
        None, gt=0, lt=1, description="decay of an average of the weights, evaluated beside them"
    )
    compile: bool = outside_identity(False, "torch.compile the model")
    accelerator: Literal["auto", "cpu", "cuda"] = outside_identity("auto", "where to train")
    devices: PositiveInt = outside_identity(1, "that share every batch (DDP)")
    checkpoint_every: PositiveFloat = outside_identity(60.0, "seconds between checkpoints")
    diagnostics: Diagnostics | None = outside_identity(None, "what to record of attention layers")
