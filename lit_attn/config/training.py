"""Length, precision and devices of a cell's training, and the diagnostics recorded meanwhile."""

import math
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from lit_attn.config.loggers import MetricLogger
from lit_attn.schema.base import Config, outside_identity

Kind = Literal["residual", "rank", "maps", "heads", "mixture"]

# Diagnostics that need samples; the others read weights only.
OF_SAMPLES = {"residual", "rank", "maps"}


class Diagnostics(Config):
    """Quantities of the attention layers that the papers plot, recorded at evaluations.

    *residual*: norms and angles of MH and Delta (BeliefFormer Fig. 3); *rank*: ranks of the
    attention matrices (MGK Fig. 2, 7); *maps*: the attention matrices of one sample (MGK Fig. 6);
    *heads*: diversity of the QK and OV circuits (DCMHA Fig. 5); *mixture*: the learned pi (MGK
    Table 8). A layer without such a quantity, for example linear keys without an attention matrix,
    records nothing, because a study compares mechanisms.
    """

    kinds: tuple[Kind, ...] = Field(min_length=1, description="quantities to record")
    samples: PositiveInt = Field(32, description="samples of the first evaluation batch to read")
    every: PositiveInt = Field(
        1, description="evaluations between records; the last evaluation is always recorded"
    )
    first_epoch_every: PositiveInt | None = Field(
        None, description="steps between further records in the first epoch; null: none"
    )


class Training(Config):
    """Length, precision and devices of a cell's training."""

    epochs: PositiveInt = Field(
        description="passes over the data, or multiples of `data.epoch_steps`"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="arithmetic of the forward and backward pass"
    )
    evaluation: Literal["fp32", "as-training"] = Field(
        "fp32", description="arithmetic of evaluations; as-training: the same as `precision`"
    )
    clip: PositiveFloat | None = Field(None, description="largest gradient norm; null: no clipping")
    max_steps: PositiveInt | None = Field(
        None, description="training steps after which the cell stops; null: all epochs"
    )
    stretch: PositiveFloat = Field(
        1.0,
        description="factor on the number of training steps, rounded to whole steps; the schedule "
        "is stretched with them (the `match: flops | time` of a study sets it)",
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
        None, "records of attention layers; null: none"
    )
    loggers: tuple[MetricLogger, ...] = outside_identity(
        (), "experiment trackers that receive the metrics beside metrics.csv and TensorBoard"
    )

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of training steps."""
        steps = min(self.epochs * steps_per_epoch, self.max_steps or math.inf)
        return max(1, round(self.stretch * steps))
