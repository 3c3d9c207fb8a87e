"""Base class of the data configurations."""

from pydantic import PositiveInt

from lit_attn.schema.base import Kind


class Data(Kind):
    """What a cell trains and evaluates on; batch sizes are over all devices."""

    batch_size: PositiveInt = 128
    eval_batch_size: PositiveInt = 512

    def require_a_batch(self, samples: int) -> None:
        """ValueError where an epoch of so many samples is no whole batch."""
        if self.batch_size > samples:
            raise ValueError(
                f"batch_size: {self.batch_size} is more than the {samples} samples of an epoch; "
                f"{samples} at most"
            )
