"""Trial of token mixers before the first cell: each property that a task needs is tried out.

A layer of a user may compute something else than its author thinks: a mask that is one token off,
or a norm over the batch, changes results without an error. The trial builds each layer with the
sizes of the model, and refuses it in one line.

The trial runs on the CPU when a configuration is read. A layer that needs a GPU is tried out on the
device that trains it, before the first cell and again by each cell.

Shapes: B batch, n tokens, d width.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.mixer import InputCache, TokenMixer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import Model, find_mixers
from lit_attn.models.recorded_calls import recorded_calls
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure

MAX_TOKENS = 96
"""Tokens of the trial at most: more than the usual chunk of a layer, 64."""

CPU = torch.device("cpu")

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that counts as rounding in float32."""


class Use(NamedTuple):
    """Way in which a model uses a mixer: sizes, and what its calls need."""

    spec: AttentionSpec
    dim: int
    heads: int
    tokens: int
    is_causal: bool
    has_padding: bool

    @property
    def needs_gpu(self) -> bool:
        """True if the mixer cannot run on a CPU."""
        assert self.spec.mixer is not None
        return self.spec.mixer.needs_gpu


def try_mixers(model: Model, signature: Any, precision: str) -> None:
    """Try out every token mixer of `model` that needs no GPU, for data with `signature`.

    Raises ConfigError for a layer without a property that the model needs.
    """
    for use in find_uses(model, signature):
        if not use.needs_gpu:
            with torch.random.fork_rng(devices=[]):
                try_use(use, precision, CPU)


def has_gpu_mixers(model: Model) -> bool:
    """Return True if a token mixer of `model` needs a GPU."""
    return any(mixer.needs_gpu for mixer in find_mixers(model))


def try_gpu_mixers(model: Model, signature: Any, precision: str, device: torch.device) -> None:
    """Try out every token mixer of `model` that needs a GPU, on the `device` that trains it.

    Raises ConfigError for a CPU, and for a layer without a property that the model needs.
    """
    targets = [mixer.target for mixer in find_mixers(model) if mixer.needs_gpu]
    if device.type == "cpu":
        raise ConfigError(
            f"model: attention: {targets[0]} needs a GPU, but this cell trains on the CPU; "
            "nothing was tried"
        )
    for use in find_uses(model, signature):
        if use.needs_gpu:
            with torch.random.fork_rng(devices=[device]):
                try_use(use, precision, device)


def try_use(use: Use, precision: str, device: torch.device) -> None:
    """Try out one mixer on `device`; the caller restores the random numbers."""
    torch.manual_seed(0)
    with device:
        Trial(use).run(precision)


def find_uses(model: Model, signature: Any) -> list[Use]:
    """Return the different ways in which `model` uses token mixers, from a pass without values."""
    with torch.device("meta"):
        network = model.build(signature, "meta").eval()
    with recorded_calls(network, TokenMixer, describe_use) as uses:
        network(*signature.sample())
    return list(dict.fromkeys(uses))


def describe_use(mixer: TokenMixer, arguments: Mapping[str, Any]) -> Use:
    """Return the use of `mixer` in a call with these arguments."""
    return Use(
        spec=mixer.spec,
        dim=mixer.dim,
        heads=mixer.num_heads,
        tokens=arguments["x"].shape[1],
        is_causal=bool(arguments.get("is_causal", False)),
        has_padding=arguments.get("attn_mask") is not None,
    )


class Trial:
    """Trial of one mixer; each method raises ConfigError if the layer lacks a property.

    The layer and its tokens are built on the default device of torch.
    """

    def __init__(self, use: Use) -> None:
        self.use = use
        # Its class is that of a layer of `kind: module`.
        self.mixer: Any = attn_layer(use.spec)(use.dim, use.heads)
        self.tokens = min(max(use.tokens, 2), MAX_TOKENS)
        self.x = torch.randn(2, self.tokens, use.dim)

    def run(self, precision: str) -> None:
        """Try out everything that the model needs, training in `precision` included."""
        self.mixer.eval()
        if self.mixer.is_causal_only and not self.use.is_causal:
            raise self.refusal("is causal only, but this model does not use it in causal order")
        with torch.no_grad():
            output = self.call(self.x)
            self.check_output(output)
            if not torch.equal(self.call(self.x), output):
                raise self.refusal("two evaluations of one input differ; it must be deterministic")
            self.check_samples(output)
            self.check_batch(output)
            if self.use.is_causal:
                self.check_order(output)
                self.check_length(output)
                self.check_cache(output)
            if self.use.has_padding:
                self.check_padding()
            self.mixer.train()
            output = self.call(self.x)
            self.check_output(output)
            self.check_samples(output)
            if self.use.is_causal:
                self.check_order(output)
            if self.use.has_padding:
                self.check_padding()
        self.check_gradients()
        if precision != "fp32":
            with torch.autocast(self.x.device.type, torch.bfloat16):
                self.check_output(self.call(self.x), is_half=True)

    def call(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        """Return the mixer's output as the model calls it; `present` (B, n) hides padding."""
        mask = None if present is None else present[:, None, None, :]
        if self.mixer.training:
            # Dropout draws the same numbers in each call.
            torch.manual_seed(0)
        try:
            output: Tensor = self.mixer(x, mask, self.use.is_causal)
        except ConfigError:
            raise
        except Exception as error:
            # Code of a user can raise any exception.
            shape = " x ".join(str(side) for side in x.shape)
            raise ConfigError(
                explain_failure(error, f"attention: {self.mixer.name}, for tokens {shape}")
            ) from error
        return output

    def refusal(self, reason: str) -> ConfigError:
        """Return the error about the layer, with file and line of its `forward`."""
        mode = " in training" if self.mixer.training else ""
        return ConfigError(f"attention: {self.mixer.name}:{mode} {reason}")

    def differ(self, output: Tensor, expected: Tensor) -> bool:
        """Return True if two outputs differ by more than rounding."""
        limit = TOLERANCE * (1 + float(expected.abs().max()))
        return bool((output - expected).abs().max() > limit)

    def check_output(self, output: Tensor, is_half: bool = False) -> None:
        """Require finite numbers and, without autocast, the type of the tokens."""
        if not is_half and output.dtype != self.x.dtype:
            raise self.refusal(f"returns {output.dtype} for tokens of {self.x.dtype}")
        if not output.isfinite().all():
            place = " in bfloat16 (training.precision)" if is_half else ""
            raise self.refusal(f"returns numbers that are not finite{place}")

    def check_batch(self, output: Tensor) -> None:
        """Require that a sample has the same output in a batch of its own."""
        if self.differ(self.call(self.x[:1]), output[:1]):
            raise self.refusal("the size of the batch changes the output of a sample")

    def check_length(self, output: Tensor) -> None:
        """Require that the first tokens alone have the same outputs; decoding relies on it."""
        first = self.tokens // 2
        if self.differ(self.call(self.x[:, :first]), output[:, :first]):
            raise self.refusal(
                f"the first {first} of {self.tokens} tokens have other outputs without the later "
                "tokens, so decoding would differ; let no weight depend on the number of tokens"
            )

    def check_samples(self, output: Tensor) -> None:
        """Require that a sample does not change the output of another one."""
        changed = self.x.clone()
        changed[1] = torch.randn_like(changed[1])
        if self.differ(self.call(changed)[0], output[0]):
            raise self.refusal("a sample of a batch changes the output of another sample")

    def check_order(self, output: Tensor) -> None:
        """Require that a later token does not change an earlier output."""
        for first in (1, self.tokens // 2, self.tokens - 1):
            changed = self.x.clone()
            changed[:, first:] = torch.randn_like(changed[:, first:])
            if self.differ(self.call(changed)[:, :first], output[:, :first]):
                raise self.refusal(
                    "this task needs causal order, but a later token changes an earlier output; "
                    "let `forward` take `is_causal`, or choose a causal layer"
                )

    def check_cache(self, output: Tensor) -> None:
        """Require that the layer's own cache gives the outputs of the complete sequence."""
        cache = self.mixer.new_cache()
        if isinstance(cache, InputCache):
            # It computes all tokens again, as check_length has done.
            return
        half = self.tokens // 2
        bounds = [0, half, *range(half + 1, self.tokens + 1)]
        try:
            parts = [
                self.mixer(self.x[:, start:stop], None, True, cache=cache)
                for start, stop in pairwise(bounds)
            ]
        except Exception as error:
            # Code of a user can raise any exception.
            raise ConfigError(
                explain_failure(error, f"attention: {self.mixer.name}, with its cache")
            ) from error
        if self.differ(torch.cat(parts, 1), output):
            raise self.refusal("with its cache, it computes other outputs than without")

    def check_padding(self) -> None:
        """Require that tokens of padding change no other output."""
        present = torch.ones(2, self.tokens, dtype=torch.bool)
        present[1, self.tokens // 2 :] = False
        changed = self.x.clone()
        changed[~present] = torch.randn_like(changed[~present])
        output = self.call(self.x, present)
        if self.differ(self.call(changed, present)[present], output[present]):
            raise self.refusal(
                "the data have padding, which changes the outputs of other tokens; let `forward` "
                "take `present` (B, n), False where a token is padding"
            )

    def check_gradients(self) -> None:
        """Require a finite gradient for the tokens and for every trained parameter."""
        x = self.x.clone().requires_grad_()
        output = self.call(x)
        if not output.requires_grad:
            raise self.refusal("its output has no gradient")
        (output * torch.randn_like(output)).sum().backward()
        gradients = {"its tokens": x.grad}
        for name, parameter in self.mixer.layer.named_parameters():
            if parameter.requires_grad:
                gradients[f"its parameter `{name}`"] = parameter.grad
        for name, gradient in gradients.items():
            if gradient is None:
                raise self.refusal(f"its output does not depend on {name}")
            if not gradient.isfinite().all():
                raise self.refusal(f"the gradient of {name} is not finite")
