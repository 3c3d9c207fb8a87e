"""SET-Adam (Zhang 2024, arXiv 2302.01029): Adam with a smaller range of adaptive step sizes.

For every parameter tensor l with d_l entries and Adam's moments m and v:

    v~ = v (sum v)^2 / (d_l sum v^2)                 down-scaling: v times cos^2 of its angle to 1
    w  = sqrt(v~ / (1 - beta2^t) + eps)              eps inside the root
    w~ = w - tau min(w)                              down-translating
    theta <- theta - lr / (1 - beta1^t) m / w~
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Avoids 0 / 0 in the down-scaling of a tensor whose gradients were all zero.
GUARD = 1e-300


class SETAdam(torch.optim.Optimizer):
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
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, [p.grad for p in parameters], group)
        return loss

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Update tensors of one device together; one at a time would leave a GPU waiting."""
        beta1, beta2 = group["betas"]
        states = [self._state(parameter) for parameter in parameters]
        m, v = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [g.to(mean.dtype) for g, mean in zip(gradients, m, strict=True)]
        if group["weight_decay"]:
            wide = [p.to(mean.dtype) for p, mean in zip(parameters, m, strict=True)]
            gradients = list(torch._foreach_add(gradients, wide, alpha=group["weight_decay"]))
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - beta2)

        w = torch._foreach_mul(v, self._scales(v, [1 - beta2 ** s["step"] for s in states]))
        torch._foreach_add_(w, group["eps"])
        torch._foreach_sqrt_(w)
        smallest = torch.stack([tensor.amin() for tensor in w])
        torch._foreach_sub_(w, list((group["tau"] * smallest).unbind()))
        moves = torch._foreach_div(m, w)
        torch._foreach_mul_(moves, [-group["lr"] / (1 - beta1 ** s["step"]) for s in states])
        narrow = [move.to(p.dtype) for p, move in zip(parameters, moves, strict=True)]
        torch._foreach_add_(parameters, narrow)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the parameter's moments and its number of steps, this step included."""
        state = self.state[parameter]
        if not state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        state["step"] += 1
        return state

    @staticmethod
    def _scales(v: list[Tensor], corrections: list[float]) -> list[Tensor]:
        """Return cos^2 of every tensor's angle to 1, over its bias correction; 0 for zeros.

        Sums are in float64: in float32 the squares of v vanish for gradients below about 1e-10.
        """
        total, length = (
            torch.stack(torch._foreach_norm(v, order, dtype=torch.float64)) for order in (1, 2)
        )
        divisors = [
            tensor.numel() * correction for tensor, correction in zip(v, corrections, strict=True)
        ]
        cosines = (total / length.clamp_min(GUARD)).square()
        scales = cosines / torch.tensor(divisors, dtype=torch.float64, device=cosines.device)
        return list(scales.to(v[0].dtype).unbind())
