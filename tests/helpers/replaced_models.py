"""Names of the layers and state of a model, before and after a replacement."""

from typing import Any

import torch
from torch import nn

from lit_attn.attention.layer import Attention


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Attention)]


def describe(model: nn.Module) -> dict[str, Any]:
    """Return everything that a refusal must leave as it is."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "parameters": [
            (name, id(p), p.requires_grad, p.device, p._version)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "buffers": [(name, id(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        "hooks": [[len(getattr(m, name)) for name in hooks] for m in model.modules()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "random": torch.get_rng_state(),
        "nested": [getattr(module, "use_nested_tensor", None) for module in model.modules()],
    }


def assert_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = describe(model)
    for name, value in before.pop("state").items():
        assert torch.equal(after["state"][name], value), name
    after.pop("state")
    assert torch.equal(before.pop("random"), after.pop("random"))
    assert after == before
