"""Models for the tests of replacements, their layers, and their state before and after it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_attn import replace_attention
from lit_attn.attention.layer import Attention
from lit_attn.replace import ADAPTERS
from lit_attn.replace.search import classify
from lit_attn.schema.errors import ConfigError


def make_hub(
    kind: str,
    options: dict[str, Any],
    implementation: str = "sdpa",
    factory: Any = AutoModelForCausalLM,
    seed: int = 0,
) -> Any:
    """Return a model of transformers with random weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **options)
    # The other products of experts exist in single precision only.
    config._experts_implementation = "eager"
    return factory.from_config(config, attn_implementation=implementation)


@torch.no_grad()
def enlarge(model: nn.Module) -> nn.Module:
    """Multiply the matrices of all attention modules: logits of 100 reveal a cap or a clip."""
    for module in list(model.modules()):
        if classify(module, ADAPTERS) is not None:
            for parameter in module.parameters():
                if parameter.ndim > 1:
                    parameter *= 5
    return model


class Renamed(nn.Module):
    """Attention with the names and options of Llama's, but without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.scaling = 0.7
        self.attention_dropout = 0.0
        self.is_causal = True
        self.clip: float | None = None
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(16, 16))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        q, k, v = (
            projection(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scaling
        )
        if self.clip is not None:
            heads = heads.clamp(-self.clip, self.clip)
        return self.o_proj(heads.transpose(1, 2).flatten(2)) * read_factor(self), None


def read_factor(module: nn.Module) -> float:
    """Return a factor that the code of the class does not show."""
    return getattr(module, "heads_factor", 1.0)


def find_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Attention)]


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


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


def assert_refused(model: nn.Module, mechanism: Any, message: str, **options: Any) -> None:
    """Fail unless a replacement is refused in one line and leaves the model as it is."""
    before = describe(model)
    with pytest.raises(ConfigError, match=message) as caught:
        replace_attention(model, mechanism, **options)
    assert "\n" not in str(caught.value)
    assert_unchanged(before, model)
