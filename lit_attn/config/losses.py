"""Losses."""

from pydantic import Field

from lit_attn.schema.base import Config


class Loss(Config):
    """Cross-entropy; `label_smoothing` spreads that share of the target over all classes."""

    label_smoothing: float = Field(0.0, ge=0, lt=1)
