"""Average of the weights during a training, which is evaluated beside the weights."""

from pydantic import Field

from lit_attn.schema.base import Config, consistency_check


class WeightAverage(Config):
    """Exponential moving average, or the mean of the weights after each of the last epochs."""

    decay: float | None = Field(None, gt=0, lt=1, description="decay of the moving average")
    epochs: int | None = Field(None, ge=2, description="last epochs of which the mean is taken")

    @consistency_check
    def _is_of_one_kind(self) -> None:
        """Refuse both or none of the averages."""
        if (self.decay is None) == (self.epochs is None):
            raise ValueError("set either `decay` or `epochs`")
