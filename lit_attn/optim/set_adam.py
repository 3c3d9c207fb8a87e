"""SET-Adam: Adam with a smaller range of adaptive step sizes (Zhang 2024, arXiv:2302.01029).

For every parameter tensor l with d_l entries and Adam's moments m and v:

    v~ = v (sum v)^2 / (d_l sum v^2)                 down-scaling: v times cos^2 of its angle to 1
    w  = sqrt(v~ / (1 - beta2^t) + eps)              eps inside the root
    w~ = w - tau min(w)                              down-translating
    theta <- theta - lr / (1 - beta1^t) m / w~
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from lit_attn.optim.standard import Adaptive
from lit_attn.schema.base import Share

# Avoids 0 / 0 in the down-scaling of a tensor whose gradients were all zero.
GUARD = 1e-300


class SetAdamOptimizer(torch.optim.Optimizer):
    """SET-Adam with coupled weight decay (L2) and a state in float32 or wider."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-18,
        tau: float = 0.5,
        weight_decay: float = 0.0,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "tau": tau, "weight_decay": weight_decay}
        super().__init__(params, values)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter tensor and its state, with the options of its `group`."""
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        m = state["exp_avg"]
        v = state["exp_avg_sq"]
        first_correction = 1 - beta1 ** state["step"]
        second_correction = 1 - beta2 ** state["step"]
        gradient = gradient.to(m.dtype) + group["weight_decay"] * parameter.to(m.dtype)
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # In float32 the squares of v would vanish for gradients below about 1e-10.
        total = v.norm(1, dtype=torch.float64)
        length = v.norm(2, dtype=torch.float64)
        squared_cosine = (total / length.clamp_min(GUARD)).square() / v.numel()
        scale = (squared_cosine / second_correction).to(v.dtype)
        w = (v * scale + group["eps"]).sqrt_()
        # A command that reads a study imports this module, and FSDP would take half a second.
        from lit_attn.models.sharding import to_plain

        # A device can have no entry of a sharded tensor, and so no minimum.
        w -= group["tau"] * to_plain(w).amin()
        parameter.sub_(group["lr"] / first_correction * m / w)


class SetAdam(Adaptive, kind="set-adam"):
    """SET-Adam (Zhang 2024): Adam with a suppressed range of adaptive step sizes."""

    target = SetAdamOptimizer
    eps: PositiveFloat = Field(1e-18, description="added to the mean square, in the root")
    tau: Share = Field(0.5, description="share of a tensor's smallest divisor to subtract")

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.target(
            self.grouped_parameters(module),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            tau=self.tau,
            weight_decay=self.weight_decay,
        )
        return optimizer
