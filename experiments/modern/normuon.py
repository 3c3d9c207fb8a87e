"""Plug-in for the optimiser of nanochat: NorMuon for matrices, and AdamW with a rate for each kind.

The experiments of this folder name this file under `parts`, and docs/modern.md describes it.

Sources: nanochat/optim.py and nanochat/gpt.py of github.com/karpathy/nanochat at 92d63d4; Muon,
Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Polar Express, Amsel et al. 2025,
https://arxiv.org/abs/2505.16932; NorMuon, Li et al. 2025, https://arxiv.org/abs/2510.05491.

Shapes: A x B a matrix.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_attn.attention.layer import Attention
from lit_attn.attention.precision import wide
from lit_attn.optim.base import Optimizer
from lit_attn.optim.muon import JoinedOptimizer, Muon
from lit_attn.schema.base import Share

POLYNOMIALS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients a, b, c of a X + b X X'X + c X (X'X)^2 in each step of Polar Express."""


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix with nearly the singular vectors of `matrix` and singular values near 1.

    The rows get equal norms first. The result has the Frobenius norm sqrt(min(A, B)).
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    mean_norm = wide(x).norm() / x.shape[0] ** 0.5
    row_norms = wide(x).norm(dim=1, keepdim=True).clamp_min(1e-6)
    x = x * (mean_norm / row_norms).to(x.dtype)
    x = x / (x.norm() * 1.01 + 1e-6)
    is_tall = x.shape[0] > x.shape[1]
    for a, b, c in POLYNOMIALS[:steps]:
        # The products have the size of the shorter side.
        gram = x.T @ x if is_tall else x @ x.T
        combined = b * gram + c * (gram @ gram)
        x = a * x + (x @ combined if is_tall else combined @ x)
    x = x.to(matrix.dtype)
    norm = wide(x).norm().clamp_min(1e-6)
    return x * (min(x.shape) ** 0.5 / norm).to(x.dtype)


class NorMuon(torch.optim.Optimizer):
    """Muon whose step is divided by the root mean square of its rows or columns (NorMuon).

    A matrix may be a stack of others: `rows` has the rows of each, in a group of one parameter.
    Weight decay acts only where it has the direction of the step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], beta2: float, steps: int) -> None:
        super().__init__(groups, {"beta2": beta2, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and return the value of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Change `parameter` in place."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        direction = parameter.grad.lerp(momentum, group["momentum"])
        pieces = zip(direction.split(group["rows"]), parameter.split(group["rows"]), strict=True)
        for number, (piece, weights) in enumerate(pieces):
            update = orthogonalise(piece, group["steps"])
            update = self._normalise(update, state, f"squares{number}", group["beta2"])
            rows, columns = weights.shape
            rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            is_decayed = update * weights >= 0
            decay = rate * group["weight_decay"] * weights * is_decayed
            weights.sub_(rate * update + decay)

    def _normalise(self, update: Tensor, state: dict[str, Any], key: str, beta2: float) -> Tensor:
        """Return `update` with rows, or columns of a wide matrix, of similar size; same norm."""
        axis = 1 if update.shape[0] >= update.shape[1] else 0
        squares = wide(update).square().mean(axis, keepdim=True)
        if key not in state:
            state[key] = torch.zeros_like(squares, dtype=update.dtype)
        running: Tensor = state[key]
        running.lerp_(squares.to(running.dtype), 1 - beta2)
        scale = running.clamp_min(1e-10).rsqrt()
        length = update.shape[axis]
        norm = (squares.sum() * length).sqrt()
        scaled_norm = (squares * length * wide(scale).square()).sum().sqrt()
        factors = scale * (norm / scaled_norm.clamp_min(1e-10))
        return update * factors.to(update.dtype)


class NanochatOptimizer(Optimizer, kind="normuon"):
    """NorMuon for the matrices of the blocks, and AdamW with the settings of nanochat for the rest.

    q, k and v of a layer are matrices of their own. Value embeddings have half of `embedding_lr`;
    the factors of the residual stream have a hundredth of `scalar_lr`, those of the embeddings
    `scalar_lr`. Vectors of a mechanism have `other_lr`. Only Muon follows the schedule's momentum
    and weight decay.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not.
    takes_shards = False
    head_lr: PositiveFloat = Field(0.008, description="peak learning rate of the head")
    embedding_lr: PositiveFloat = Field(0.3, description="peak learning rate of the embeddings")
    scalar_lr: PositiveFloat = Field(0.5, description="peak learning rate of the input factors")
    smear_lr: PositiveFloat = Field(
        0.2, description="peak learning rate of the smear and of the middle factor"
    )
    other_lr: PositiveFloat = Field(
        0.01, description="peak learning rate of all other vectors, which only mechanisms have"
    )
    beta2: Share = Field(0.9, description="decay of Muon's mean squares of rows or columns")
    steps: PositiveInt = Field(5, le=5, description="steps of Polar Express")

    def build(self, module: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        stacked = find_stacked(module)
        matrices = Muon(lr=self.lr).list_matrices(module)
        muon_groups = []
        chosen = set()
        for name, matrix in matrices.items():
            if "smear_gate" in name:
                continue
            chosen.add(id(matrix))
            rows = stacked.get(id(matrix), [matrix.shape[0]])
            muon_groups.append(
                {
                    "params": [matrix],
                    "rows": rows,
                    "momentum": 0.95,
                    "weight_decay": self.weight_decay,
                }
            )
        by_settings: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in self.parameters(module):
            if id(parameter) not in chosen:
                settings = self._settings(names[id(parameter)])
                by_settings.setdefault(settings, []).append(parameter)
        adamw_groups = []
        for (lr, betas, weight_decay), parameters in by_settings.items():
            adamw_groups.append(
                {
                    "params": parameters,
                    "lr": lr,
                    "betas": betas,
                    "weight_decay": weight_decay,
                    "lr_scale": lr / self.lr,
                    "keeps_constants": True,
                }
            )
        optimizers: list[torch.optim.Optimizer] = []
        if muon_groups:
            for group in muon_groups:
                group["lr"] = self.lr
            optimizers.append(NorMuon(muon_groups, self.beta2, self.steps))
        if adamw_groups:
            optimizers.append(torch.optim.AdamW(adamw_groups, eps=1e-10, fused=fused))
        return JoinedOptimizer(optimizers)

    def _settings(self, name: str) -> tuple[float, tuple[float, float], float]:
        """Return rate, betas and weight decay of AdamW for the parameter `name`."""
        if name.startswith("head."):
            return self.head_lr, (0.8, 0.96), 0.01
        if name == "trunk.tokens.weight":
            return self.embedding_lr, (0.8, 0.995), 0.001
        if name.endswith("value_embedding.embedding.weight"):
            return self.embedding_lr / 2, (0.8, 0.995), 0.01
        if name == "trunk.stream_factors":
            return self.scalar_lr / 100, (0.8, 0.95), 0.05
        if name == "trunk.input_factors":
            return self.scalar_lr, (0.96, 0.95), 0.0
        if name in ("trunk.smear_gate.weight", "trunk.smear", "trunk.middle_factor"):
            return self.smear_lr, (0.8, 0.95), 0.0
        return self.other_lr, (0.8, 0.95), 0.0


def find_stacked(module: nn.Module) -> dict[int, list[int]]:
    """Return the rows of q, k and v in the joined matrix of each attention layer, by its id."""
    stacked = {}
    for layer in module.modules():
        if isinstance(layer, Attention):
            stacked[id(layer.qkv.weight)] = list(layer.projected)
    return stacked
