"""SET-Adam (Zhang 2024, arXiv 2302.01029): Adam with its adaptive step sizes pulled together.

For every parameter tensor l of d_l entries, with Adam's moments m and v:

    v~ = v (sum v)^2 / (d_l sum v^2)                 down-scaling: v times cos^2 of its angle to 1
    w  = sqrt(v~ / (1 - beta2^t) + eps)              eps embedded in the root
    w~ = w - tau min(w)                              down-translating
    theta <- theta - lr / (1 - beta1^t) m / w~
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Keeps 0 / 0 out of the down-scaling of a tensor whose gradients were all zero.
GUARD = 1e-20


class SETAdam(torch.optim.Optimizer):
    """SET-Adam; weight decay is coupled (L2), the state is kept in float32 or wider."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-18,
        tau: float = 0.5,
        weight_decay: float = 0.0,
    ) -> None:
        """Raise ValueError for a negative rate, eps or decay, or betas or tau outside [0, 1)."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, is {value}")
        for name, value in (("beta1", betas[0]), ("beta2", betas[1]), ("tau", tau)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), is {value}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "tau": tau,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
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
        wide = torch.promote_types(parameter.dtype, torch.float32)
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient = gradient.to(wide)
        if group["weight_decay"]:
            gradient = gradient.add(parameter.to(wide), alpha=group["weight_decay"])
        m = state["exp_avg"].lerp_(gradient, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        # Squares of v underflow in float32 from gradients of about 1e-10; v relative to its largest
        # entry does not, and cos^2 does not see the scale.
        relative = v / v.max().clamp_min(GUARD)
        squares = relative.square().sum().clamp_min(GUARD)
        cos_squared = relative.sum().square() / (v.numel() * squares)
        w = (v * cos_squared / (1 - beta2 ** state["step"]) + group["eps"]).sqrt_()
        w -= group["tau"] * w.min()
        parameter.add_(
            (m / w).to(parameter.dtype), alpha=-group["lr"] / (1 - beta1 ** state["step"])
        )
