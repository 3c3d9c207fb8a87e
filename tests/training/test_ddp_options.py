"""Options of DistributedDataParallel that a network allows."""

from typing import Any

import pytest
from helpers.two_ranks import transformer
from torch import nn

from lit_attn.training.several_devices import choose_ddp_options, choose_strategy


class Foreign(nn.Module):
    """Module of a user, whose graph may change from step to step."""


def with_foreign_part() -> nn.Module:
    network = transformer("standard")
    network.blocks[0].attn.dropout = Foreign()  # type: ignore[index, union-attr]
    return network


def with_unused_part() -> nn.Module:
    network = transformer("standard")
    network.leaves_parameters_unused = True  # type: ignore[assignment]
    return network


@pytest.mark.parametrize(
    ("network", "accumulate", "expected"),
    [
        (transformer("mgk"), 1, {"static_graph": True, "broadcast_buffers": False}),
        (transformer("mgk"), 2, {"static_graph": False, "broadcast_buffers": False}),
        (with_foreign_part(), 1, {"static_graph": False, "broadcast_buffers": True}),
        (
            with_unused_part(),
            1,
            {"static_graph": False, "broadcast_buffers": False, "find_unused_parameters": True},
        ),
    ],
    ids=["known", "micro-batches", "foreign part", "unused parameters"],
)
def test_a_network_decides_on_its_options(
    network: nn.Module, accumulate: int, expected: dict[str, Any]
) -> None:
    options = choose_ddp_options(network, accumulate)
    assert options["gradient_as_bucket_view"]
    assert options == {"find_unused_parameters": False, "gradient_as_bucket_view": True} | expected


def test_one_device_needs_no_ddp() -> None:
    assert choose_strategy(transformer("standard"), 1, 1) == "auto"
