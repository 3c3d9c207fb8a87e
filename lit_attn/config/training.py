"""Length, precision and devices of a cell's training."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.config.diagnostics import Diagnostics
from lit_attn.schema.base import Config, outside_identity


class Training(Config):
    """Length, precision and devices of a cell's training."""

    epochs: PositiveInt = Field(
        description="passes over the training data, or multiples of `data.epoch_steps`"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="arithmetic of the forward and backward pass"
    )
    evaluation: Literal["fp32", "as-training"] = Field(
        "fp32", description="arithmetic of evaluations; as-training: the same as `precision`"
    )
    clip: PositiveFloat | None = Field(
        None, description="greatest norm of the gradient; null: no clipping"
    )
    max_steps: PositiveInt | None = Field(
        None, description="training steps after which the cell stops; null: all epochs"
    )
    evaluate_every: PositiveInt = Field(1, description="epochs between evaluations")
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of an average of the weights, which is evaluated too; null: none",
    )
    compile: bool = outside_identity(False, "compile the model with torch.compile")
    accelerator: Literal["auto", "cpu", "cuda"] = outside_identity("auto", "device to train on")
    devices: PositiveInt = outside_identity(1, "devices that share every batch (DDP)")
    checkpoint_every: PositiveFloat = outside_identity(60.0, "seconds between checkpoints")
    diagnostics: Diagnostics | None = outside_identity(
        None, "records of the attention layers; null: none"
    )
