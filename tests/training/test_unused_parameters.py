"""Search for parameters without a gradient, before several devices train a model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_attn.config.training import Training
from lit_attn.data.log import collect_warnings
from lit_attn.schema.errors import ConfigError
from lit_attn.training.several_devices import require_gradients

FORMS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, torch.arange(3)),
    "mapping": lambda y: {"logits": [y], "loss": y.mean()},
}


class Wasteful(nn.Module):
    """Network with a Linear that nothing uses, whose output has one of FORMS."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        if self.form == "wrong":
            raise KeyError("no such form")
        return FORMS[self.form](self.used(x))


def check(form: str) -> None:
    with torch.device("meta"):
        network = Wasteful(form)
        sample = (torch.zeros(1, 4),)
    require_gradients(network, sample, Training(devices=2, epochs=1))


@pytest.mark.parametrize("form", FORMS)
def test_unused_parameters_are_found_in_outputs_of_every_form(form: str) -> None:
    with pytest.raises(ConfigError, match=r"does not depend on extra\.weight, extra\.bias"):
        check(form)


def test_a_check_that_cannot_be_made_says_so() -> None:
    """The runner shows the warnings that are collected; the process of the check has no output."""
    with collect_warnings() as warnings:
        check("wrong")
    (warning,) = warnings
    assert warning.startswith("training.devices: not checked that all parameters are used: ")
    assert "KeyError: 'no such form'" in warning
