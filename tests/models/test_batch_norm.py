"""Batch norms of models that train on several devices (tests/training/test_two_ranks.py trains)."""

import copy

import pytest
import torch
from helpers.normed_network import Grouped, Normed, Untracked
from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from torch import nn

from lit_attn.attention.layer import attn_layer
from lit_attn.models.batch_norm import Synchronised, synchronise_batch_norms

SHAPE = (1, 8, 8)


def network(network_class: type[Normed]) -> nn.Module:
    return network_class(SHAPE, 3, attn_layer("standard"))


def test_state_and_results_of_one_process_stay() -> None:
    torch.manual_seed(0)
    plain = network(Normed)
    shared = copy.deepcopy(plain)
    synchronise_batch_norms(shared)
    synchronise_batch_norms(shared)
    assert isinstance(shared.norm, nn.BatchNorm2d)
    assert isinstance(shared.norm, Synchronised)
    images = torch.randn(4, *SHAPE)
    for is_training in (True, False):
        plain.train(is_training), shared.train(is_training)
        assert torch.equal(plain(images), shared(images))
    state = shared.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    copied = copy.deepcopy(shared)
    assert torch.equal(copied(images), shared(images))


@pytest.mark.parametrize(
    ("broken", "path", "reason"),
    [
        (Grouped, "norm", "has statistics of a batch, which several devices cannot share"),
        (Untracked, "norm", "has no running statistics"),
    ],
)
def test_other_statistics_of_a_batch_are_refused(
    broken: type[Normed], path: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{path} \(\w+\) {reason}.*training.devices: 1"):
        synchronise_batch_norms(network(broken))


class OwnBatchNorm(nn.BatchNorm2d):
    """Batch norm of a user, whose call may do anything."""


@pytest.mark.parametrize("module", [OwnBatchNorm(3), nn.LazyBatchNorm2d()], ids=str)
def test_unknown_batch_norms_are_refused(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"^0 \(\w+\) has statistics of a batch"):
        synchronise_batch_norms(nn.Sequential(module))


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(3, 3),
        nn.LayerNorm(3),
        nn.InstanceNorm2d(3),
        nn.InstanceNorm2d(3, affine=True),
        FrozenBatchNormAct2d(3),
    ],
    ids=str,
)
def test_norms_of_single_samples_and_frozen_ones_stay(module: nn.Module) -> None:
    before = type(module)
    synchronise_batch_norms(nn.Sequential(module))
    assert type(module) is before


def test_timms_activation_follows_the_norm() -> None:
    plain = BatchNormAct2d(3)
    shared = nn.Sequential(copy.deepcopy(plain))
    synchronise_batch_norms(shared)
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(shared(images), plain(images))
    assert (shared(images) >= 0).all()
