"""Uses of torchmetrics' private names; NAMES in lit_attn.private_names explains each."""

from collections.abc import Callable
from typing import Any

from torchmetrics import Metric, MetricCollection


def mark_updated(metric: Metric) -> None:
    """Note that a metric, whose states were restored, has been updated."""
    metric._update_count = 1


def default_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric before its first update, by name."""
    return metric._defaults


def convert_states(metric: Metric | MetricCollection, convert: Callable[[Any], Any]) -> None:
    """Replace the states and the defaults of a metric by what `convert` returns for them."""
    metric._apply(convert)
