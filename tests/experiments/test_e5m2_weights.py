"""The plug-in for a GPT whose blocks compute with weights of 8 bits."""

import importlib
from typing import Any

import pytest
import torch
from helpers import gpt_cases
from helpers.paths import EXPERIMENTS
from helpers.saved_state import forget_values
from torch import nn

from lit_attn.attention.spec import PRESETS
from lit_attn.models.language import GPTConfig
from lit_attn.schema.plugins import load_parts
from lit_attn.signatures import TokenStream

load_parts([EXPERIMENTS / "gpt2" / "e5m2_weights.py"])
code = importlib.import_module("e5m2_weights")
E5M2GPTConfig = code.E5M2GPTConfig

SIGNATURE = TokenStream(vocabulary=gpt_cases.VOCABULARY, context=gpt_cases.CONTEXT)


def config(**changes: Any) -> GPTConfig:
    values = gpt_cases.config("casted", **changes.pop("values", {})).model_dump(exclude={"kind"})
    model: GPTConfig = E5M2GPTConfig.model_validate(values | changes)
    return model


def network(**changes: Any) -> Any:
    torch.manual_seed(0)
    return config(**changes).build(SIGNATURE, "cpu").double().eval()


def test_values_equal_a_computation_by_hand() -> None:
    """The mean magnitude is 2; values / 2 are rounded to 1, 1.25, 1.5 or 1.75 times powers of 2."""
    weight = torch.tensor([2.0, -2.2, 3.4, 0.4], requires_grad=True)
    rounded = code.e5m2(weight)
    torch.testing.assert_close(rounded, torch.tensor([2.0, -2.0, 3.5, 0.375]))
    rounded.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(4))


def test_zeros_stay_zeros() -> None:
    assert (code.e5m2(torch.zeros(3)) == 0).all()


def test_only_the_blocks_are_rounded_and_no_name_changes() -> None:
    changes = {"values": {"attention": PRESETS["belief-star"], "head": "untied"}}
    rounded = network(**changes)
    exact = network(**changes, weights="exact")
    assert rounded.state_dict().keys() == exact.state_dict().keys()
    kinds = {type(module) for module in rounded.trunk.blocks.modules()}
    assert nn.Linear not in kinds
    assert code.E5M2Linear in kinds
    assert type(rounded.head) is nn.Linear
    exact.load_state_dict(rounded.state_dict())
    difference = (rounded(gpt_cases.tokens()) - exact(gpt_cases.tokens())).abs().max()
    assert 1e-4 < difference < 1


def test_exact_weights_give_the_model_of_the_package() -> None:
    exact = network(weights="exact")
    plain = gpt_cases.network("casted")
    plain.load_state_dict(exact.state_dict())
    assert torch.equal(exact(gpt_cases.tokens()), plain(gpt_cases.tokens()))


def test_a_rounded_model_starts_with_the_weights_of_an_exact_one() -> None:
    rounded = network().state_dict()
    exact = network(weights="exact").state_dict()
    assert all(torch.equal(rounded[name], exact[name]) for name in exact)


def test_a_network_from_the_meta_device_computes_what_the_saved_network_computes() -> None:
    torch.manual_seed(0)
    saved = config().build(SIGNATURE, "cpu").eval()
    loaded = config().build(SIGNATURE, "meta").eval()
    forget_values(loaded)
    loaded.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(loaded(gpt_cases.tokens()), saved(gpt_cases.tokens()))


@pytest.mark.parametrize("weights", ["e5m2", "exact"])
def test_the_identity_is_that_of_recorded_cells(weights: str) -> None:
    """Cells have this identity since the package itself could round weights."""
    plain = gpt_cases.config("casted").identity()
    expected = {**plain, "weights": "e5m2"} if weights == "e5m2" else plain
    assert config(weights=weights).identity() == expected
