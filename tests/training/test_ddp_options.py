"""Options of DistributedDataParallel that a network allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.two_ranks import transformer
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lit_attn.training.several_devices import choose_ddp_options


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
        (transformer("mgk"), 1, {"static_graph": True, "forward_sync_buffers": False}),
        (transformer("mgk"), 2, {"static_graph": False, "forward_sync_buffers": False}),
        (with_foreign_part(), 1, {"static_graph": False, "forward_sync_buffers": True}),
        (
            with_unused_part(),
            1,
            {"static_graph": False, "forward_sync_buffers": False, "find_unused_parameters": True},
        ),
    ],
    ids=["known", "micro-batches", "foreign part", "unused parameters"],
)
def test_a_network_decides_on_its_options(
    network: nn.Module, accumulate: int, expected: dict[str, Any]
) -> None:
    options = choose_ddp_options(network, accumulate)
    # PyTorch before 2.13 has another name.
    if "broadcast_buffers" in options:
        options["forward_sync_buffers"] = options.pop("broadcast_buffers")
    assert options["gradient_as_bucket_view"]
    assert options == {"find_unused_parameters": False, "gradient_as_bucket_view": True} | expected


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    meeting = f"file://{tmp_path}/rendezvous"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_this_version_of_pytorch_takes_the_options_without_a_warning() -> None:
    for network in (transformer("standard"), with_foreign_part()):
        DistributedDataParallel(network, **choose_ddp_options(network, accumulate=1))
