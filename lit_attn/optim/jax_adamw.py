"""AdamW of JAX code, which stores parameters or the first moment in bfloat16.

Sources: github.com/Caiyun-AI/DCFormer at df8671f (jax/MaxText/layers and optimizers.py) and
github.com/google-research/big_vision at 0127fb6 (`mu_dtype` of optax; docs/setups.md, sections 7
and 10).
"""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from lit_attn.optim.standard import AdamW
from lit_attn.private_names.of_torch import multiply_in_place


class JaxAdamW(AdamW, kind="jax-adamw"):
    """AdamW that stores some parameters or the first moment in bfloat16.

    Tensors stay float32, and are rounded at the start and after each step. Rounded parameters have
    rounded gradients, and weight decay by the rounded coefficient. optax multiplies a bfloat16
    moment by beta1 in bfloat16, so 0.9 counts as 0.8984. Clipping divides the gradients by their
    norm; PyTorch's own clipping adds 1e-6 to the norm.
    """

    # Its constants come from the CPU in each step.
    is_recordable = False

    bfloat16: tuple[str, ...] = Field(
        (), description="patterns of the names of the parameters that are stored in bfloat16"
    )
    moment: Literal["float32", "bfloat16"] = Field(
        "float32", description="type in which the first moment is stored"
    )

    def clip(self, parameters: Sequence[nn.Parameter], norm: float) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        multiply_in_place(gradients, (norm / total).clamp(max=1.0))

    def parameters(self, module: nn.Module) -> list[Any]:
        rounded = {id(parameter) for parameter in self.rounded(module)}
        groups = super().parameters(module)
        rounded_groups = []
        for group in groups:
            parameters = group["params"]
            group["params"] = [p for p in parameters if id(p) not in rounded]
            decay = group.get("weight_decay", self.weight_decay)
            rounded_groups.append(
                {
                    "params": [p for p in parameters if id(p) in rounded],
                    "weight_decay": torch.tensor(decay).bfloat16().item(),
                }
            )
        return groups + rounded_groups

    def rounded(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are stored in bfloat16."""
        rounded = []
        for name, parameter in module.named_parameters():
            if any(fnmatch(name, pattern) for pattern in self.bfloat16):
                rounded.append(parameter)
        return rounded

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        optimizer = super().build(module, fused)
        rounded = self.rounded(module)

        @torch.no_grad()
        def round_gradients(*_: Any) -> None:
            for parameter in rounded:
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.bfloat16())

        @torch.no_grad()
        def store(*_: Any) -> None:
            for parameter in rounded:
                parameter.copy_(parameter.bfloat16())
            if self.moment == "bfloat16":
                beta1 = self.betas[0]
                decay = torch.tensor(beta1).bfloat16()
                for state in optimizer.state.values():
                    moment = state["exp_avg"]
                    decayed = (moment.bfloat16() * decay.to(moment.device)).float()
                    # The next step multiplies by the exact beta1.
                    moment.copy_(decayed / beta1)

        store()
        optimizer.register_step_pre_hook(round_gradients)
        optimizer.register_step_post_hook(store)
        return optimizer
