"""Record training steps of any code: losses, learning rates, betas, decay, gradients, weights.

The recorders in this folder use it on released code, and the replays use it on this project. Both
sides start from the same weights (`initial_values`), train on the same batches (`generator`), and
draw the same dropout masks (`shared_draws`), so their records must agree to rounding error.

A record holds, for each optimiser step t, the loss (mean over micro-batches), the learning rate,
both betas and the weight decay of every parameter, and the norm of every parameter's gradient
after clipping; for the last step it holds the norm of each parameter's change and a sample of
its values. It also holds the standard deviation and a sample of every parameter as the code itself
draws it before training. Parameters are named as in the released code.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SAMPLES = 8
"""Values of each trained parameter that a record keeps."""

INITIAL_SAMPLES = 200
"""Largest number of initial values of each parameter that a record keeps."""

Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Tensor]


def generator(*keys: object) -> np.random.Generator:
    """Return a generator that depends on `keys` alone, on every machine and in every version."""
    digest = hashlib.sha256("/".join(map(str, keys)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return initial values of the parameter `name`, float64.

    Matrices have the standard deviation 1 / sqrt(columns), at most 0.5; vectors called weight or
    scale lie near 1 (norms), other vectors near 0. Parameters called pi, pi0 and pi1 (weights of
    keys) lie near 0.5. No value is zero, so no gradient vanishes by symmetry.
    """
    drawn = torch.from_numpy(np.asarray(generator("weights", seed, name).standard_normal(shape)))
    if name.endswith(("pi", "pi0", "pi1")):
        return 0.5 + 0.1 * drawn
    if len(shape) > 1:
        return drawn * min(0.5, 1 / math.sqrt(math.prod(shape[1:])))
    return (1.0 if name.endswith(("weight", "scale")) else 0.0) + 0.1 * drawn


def fill(network: nn.Module, seed: int) -> None:
    """Give every trained parameter of released code its initial values, by its name."""
    with torch.no_grad():
        for name, parameter in trained(network).items():
            parameter.copy_(initial_values(name, tuple(parameter.shape), seed))


@contextlib.contextmanager
def shared_draws(seed: int, time_first: bool = False) -> Iterator[None]:
    """Draw dropout and drop-path masks from `seed`, the call's number and the mask's shape.

    With `time_first`, masks (n, B, d) are the transposed ones of (B, n, d).
    """
    calls = 0

    def uniform(shape: tuple[int, ...]) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.from_numpy(generator("draw", seed, calls, tuple(shape)).random(tuple(shape)))

    def mask(shape: tuple[int, ...], keep: float) -> Tensor:
        return (uniform(shape) < keep).double()

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p:
            return x
        if time_first:
            x = x.transpose(0, 1)
        x = x * mask(tuple(x.shape), 1 - p).to(x.dtype) / (1 - p)
        return x.transpose(0, 1) if time_first else x

    def bernoulli_(x: Tensor, p: float = 0.5) -> Tensor:
        return x.copy_(mask(tuple(x.shape), p))

    fused = torch.nn.functional.scaled_dot_product_attention

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        # The fused kernel draws its own dropout: spell out what it computes.
        if not dropout_p:
            return fused(q, k, v, attn_mask, is_causal=is_causal, **options)
        logits = q @ k.transpose(-1, -2) * (options.get("scale") or q.shape[-1] ** -0.5)
        assert not is_causal
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        return dropout(logits.softmax(-1), dropout_p) @ v

    def rand(*shape: Any, **_: Any) -> Tensor:
        # Some drop paths are floor(keep + rand(shape)), which is 1 if rand is at least 1 - keep.
        return 1 - uniform(shape[0] if isinstance(shape[0], tuple) else shape)

    with (
        patch.object(torch.nn.functional, "dropout", dropout),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", attention),
        patch.object(torch.Tensor, "bernoulli_", bernoulli_),
        patch.object(torch, "rand", rand),
    ):
        yield


def rename(tensors: Tensors, pairs: Sequence[tuple[str, str]]) -> Tensors:
    """Replace, in every name, the first part of each pair by its second, in their order.

    A first part that begins with ^ only matches the beginning of a name.
    """
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            if not old.startswith("^"):
                name = name.replace(old, new)
            elif name.startswith(old[1:]):
                name = new + name[len(old) - 1 :]
        renamed[name] = tensor
    return renamed


def cut(tensors: Tensors, part: str, parts: Sequence[str]) -> None:
    """Cut every tensor whose name contains `part` along its first axis, in place.

    The pieces have equal sizes, and their names contain one of `parts` each.
    """
    for name in [name for name in tensors if part in name]:
        pieces = tensors.pop(name).chunk(len(parts))
        for new, piece in zip(parts, pieces, strict=True):
            tensors[name.replace(part, new)] = piece


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not frozen, by their names."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


class Recorder:
    """Recorder of one training run; use it as a context manager around the training.

    `view` returns the trained parameters, or tensors of their shapes, under released names:
    `view(parameters)` for values and `view(gradients)` for gradients. `micro_batches` is the
    number of backward passes of one optimiser step.
    """

    def __init__(self, micro_batches: int = 1, loss_scale: float = 1.0) -> None:
        self.micro_batches = micro_batches
        self.loss_scale = loss_scale
        self.losses: list[float] = []
        self.losses_of_last_step = 0
        self.steps: list[dict[str, dict[str, float]]] = []
        self.initial: Tensors = {}
        self.start: Tensors | None = None
        self.end: Tensors = {}
        self.network: nn.Module | None = None
        self.view: Callable[[Tensors], Tensors] = dict

    def attach(self, network: nn.Module, view: Callable[[Tensors], Tensors] = dict) -> None:
        """Name the network whose parameters are recorded, and how they are renamed."""
        self.network, self.view = network, view
        self.start = {name: tensor.clone() for name, tensor in self._parameters().items()}

    def begin(
        self,
        network: nn.Module,
        fill_network: Callable[[nn.Module], None],
        view: Callable[[Tensors], Tensors] = dict,
    ) -> nn.Module:
        """Note a network's initial values, replace them by the shared ones, and attach it."""
        self.attach(network, view)
        assert self.start is not None
        self.initial = self.start
        fill_network(network)
        self.attach(network, view)
        return network

    def start_from(
        self, seed: int, view: Callable[[Tensors], Tensors] = dict
    ) -> Callable[[nn.Module], nn.Module]:
        """Return a function that fills a network of released code, attaches it and returns it."""
        return lambda network: self.begin(network, lambda network: fill(network, seed), view)

    def _parameters(self) -> Tensors:
        assert self.network is not None
        return self.view({name: p.detach() for name, p in trained(self.network).items()})

    def __enter__(self) -> "Recorder":
        backward = torch.Tensor.backward

        def recorded(tensor: Tensor, *rest: Any, **options: Any) -> None:
            self.losses.append(tensor.detach().double().item())
            backward(tensor, *rest, **options)

        torch.Tensor.backward = recorded  # type: ignore
        hook = register_optimizer_step_post_hook(self._after_step)
        self._undo = [lambda: setattr(torch.Tensor, "backward", backward), hook.remove]
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self.network is not None
        parameters = trained(self.network)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}

        def of_group(key: Callable[[dict[str, Any]], float]) -> dict[str, float]:
            constants = {
                name: torch.full_like(p, key(groups[id(p)]), dtype=torch.float64)
                for name, p in parameters.items()
                # A network may replace a parameter, which its optimiser then does not know.
                if id(p) in groups
            }
            return {name: t.flatten()[0].abs().item() for name, t in self.view(constants).items()}

        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach()
            for name, p in parameters.items()
        }
        if self.steps and len(self.losses) == self.losses_of_last_step:
            # Several optimisers make one step together, and that of all parameters ends it.
            self.steps.pop()
        self.losses_of_last_step = len(self.losses)
        self.steps.append(
            {
                "lr": of_group(lambda group: float(group["lr"])),
                "beta1": of_group(lambda group: float(group.get("betas", (0, 0))[0])),
                "beta2": of_group(lambda group: float(group.get("betas", (0, 0))[1])),
                "decay": of_group(lambda group: float(group["weight_decay"])),
                "gradient": {
                    name: t.double().norm().item() for name, t in self.view(gradients).items()
                },
            }
        )
        self.end = {name: tensor.clone() for name, tensor in self._parameters().items()}

    def average(self, averaged: Tensors, decay: float) -> NDArray[np.float64]:
        """Return samples of how far averaged weights moved, relative to the share of one step."""
        assert self.start is not None
        moved = {name: averaged[name] - start for name, start in self.start.items()}
        return np.array([sample(name, moved[name]) for name in sorted(moved)]) / (1 - decay)

    def arrays(self) -> Arrays:
        """Return the record: arrays (steps,) or (steps, parameters), and (parameters, samples)."""
        assert self.start is not None
        names = sorted(self.start)
        losses = np.array(self.losses).reshape(-1, self.micro_batches).sum(1) * self.loss_scale
        arrays: Arrays = {"names": np.array(names), "loss": losses[: len(self.steps)]}
        arrays["shapes"] = np.array([",".join(map(str, self.start[name].shape)) for name in names])
        for key in ("lr", "beta1", "beta2", "decay", "gradient"):
            arrays[key] = np.array([[step[key][name] for name in names] for step in self.steps])
        change = [(self.end[name] - self.start[name]).double() for name in names]
        arrays["change"] = np.array([tensor.norm().item() for tensor in change])
        arrays["sample"] = np.array([sample(name, self.end[name]) for name in names])
        return arrays | initial_arrays(self.initial)


def initial_arrays(tensors: Tensors) -> Arrays:
    """Return deviations (parameters,) and samples (parameters, INITIAL_SAMPLES) of tensors.

    A sample has different values of a tensor; NaN stands behind those of a smaller one.
    """
    names = sorted(tensors)
    samples = np.full((len(names), INITIAL_SAMPLES), np.nan, np.float32)
    for row, name in zip(samples, names, strict=True):
        flat = tensors[name].detach().double().flatten().numpy()
        places = generator("initial", name).permutation(flat.size)[:INITIAL_SAMPLES]
        row[: places.size] = flat[places]
    deviations = [tensors[name].double().std(correction=0).item() for name in names]
    return {"initial": samples, "deviation": np.array(deviations)}


def sample(name: str, tensor: Tensor) -> NDArray[np.float64]:
    """Return SAMPLES values of a parameter at places that its name decides."""
    flat = tensor.detach().double().flatten().numpy()
    return flat[generator("places", name).integers(flat.size, size=SAMPLES)]
