"""Uses of torchmetrics' private names; NAMES in lit_attn.private_names explains each."""

from typing import Any

from torchmetrics import Metric


def mark_updated(metric: Metric) -> None:
    """Note that a metric, whose states were restored, has been updated."""
    metric._update_count = 1


def default_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric before its first update, by name."""
    return metric._defaults
