"""Trial of a user's layers before the first cell: each property that a task needs is tried out.

A user's layer is one of `kind: module`, or an attention layer with a part from a user's file. The
trial builds each of them with the sizes of the model, and refuses it in one line
(lit_attn.models.trial_checks).

The trial runs on the CPU when a configuration is read. A layer that needs a GPU is tried out before
the first cell, on the device that trains it.

Shapes: B batch, n tokens, d width.
"""

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.mixer import InputCache, TokenMixer
from lit_attn.attention.network import number_layers
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import Model, find_mixers, find_specs
from lit_attn.models.recorded_calls import recorded_calls
from lit_attn.models.trial_checks import Region, Trial, add_noise, differ, name_class
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure
from lit_attn.schema.sources import PACKAGE
from lit_attn.signatures import CausalTokens

MAX_TOKENS = 96
"""Tokens of the trial at most: more than the usual chunk of a layer, 64."""

CPU = torch.device("cpu")


class Use(NamedTuple):
    """Way in which a model uses a layer: sizes, and what its calls need.

    `is_cross`: keys and values come from other tokens.
    """

    spec: AttentionSpec
    dim: int
    heads: int
    tokens: int
    is_causal: bool
    has_padding: bool
    is_cross: bool = False
    is_local: bool = False

    @property
    def needs_gpu(self) -> bool:
        """True if the layer cannot run on a CPU."""
        return self.spec.mixer is not None and self.spec.mixer.needs_gpu


def try_layers(model: Model, signature: Any, precision: str) -> None:
    """Try out every layer of a user in `model` that needs no GPU, for data with `signature`.

    Raises ConfigError for a layer without a property that the model needs.
    """
    for use in find_uses(model, signature):
        if not use.needs_gpu:
            with torch.random.fork_rng(devices=[]):
                try_use(use, precision, CPU)


def has_own_layers(model: Model) -> bool:
    """Return True if a layer of `model` is of `kind: module` or has a part of a user."""
    for choice in find_specs(model):
        for spec in choice.mechanisms:
            if spec.mixer is not None or list_own_parts(spec):
                return True
    return False


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


@cache
def try_use(use: Use, precision: str, device: torch.device) -> None:
    """Try out one layer on `device`; the caller restores the random numbers."""
    torch.manual_seed(0)
    with device:
        if use.spec.mixer is not None:
            MixerTrial(use).run(precision)
        else:
            try_parts(use)


def try_parts(use: Use) -> None:
    """Try out an attention layer with parts of a user. The error names the part that is wrong."""
    families = list_own_parts(use.spec)
    try:
        PartsTrial(use, families).run()
    except ConfigError:
        if len(families) == 1:
            raise
        for family in families:
            if _passes_without(use, family):
                PartsTrial(use, [family]).run()
        raise


def _passes_without(use: Use, family: str) -> bool:
    """Return True if the layer passes the trial with the default part of `family`."""
    default = AttentionSpec.model_fields[family].default
    spec = use.spec.model_copy(update={family: default})
    try:
        PartsTrial(use._replace(spec=spec), [family]).run()
    except Exception:
        # Parts of a user may not work without each other, and raise any exception.
        return False
    return True


def list_own_parts(spec: AttentionSpec) -> list[str]:
    """Return the families whose part in `spec` is defined outside of this package."""
    return [
        family
        for family, part in spec.parts.items()
        if not type(part).__module__.startswith(f"{PACKAGE.name}.")
    ]


def find_uses(model: Model, signature: Any) -> list[Use]:
    """Return the different ways in which `model` uses a user's layers.

    A pass without values records them. The layers of a model for causal tokens are causal, also if
    the order is in a mask.
    """
    is_ordered = isinstance(signature, CausalTokens)
    with torch.device("meta"):
        network = model.build(signature, "meta").eval()
    network.requires_grad_(False)
    with (
        recorded_calls(network, TokenMixer, describe_use) as mixers,
        recorded_calls(network, Attention, describe_use) as attention,
    ):
        network(*signature.sample())
    uses = mixers + [use for use in attention if list_own_parts(use.spec)]
    ordered = [use._replace(is_causal=use.is_causal or is_ordered) for use in uses]
    return list(dict.fromkeys(ordered))


def describe_use(layer: Any, arguments: Mapping[str, Any]) -> Use:
    """Return the use of `layer` in a call with these arguments."""
    is_attention = isinstance(layer, Attention)
    return Use(
        spec=layer.spec,
        dim=layer.num_heads * layer.head_dim if is_attention else layer.dim,
        heads=layer.num_heads,
        tokens=arguments["x"].shape[1],
        is_causal=bool(arguments.get("is_causal", False)),
        has_padding=arguments.get("attn_mask") is not None,
        is_cross=arguments.get("memory") is not None,
        is_local=layer.local_self_attention,
    )


class LayerTrial(Trial):
    """Trial of one layer, which is built on the default device of torch.

    `name` begins the errors after "attention: ".
    """

    name: str

    def __init__(self, use: Use) -> None:
        self.use = use
        self.is_causal = use.is_causal
        self.tokens = min(max(use.tokens, 2), MAX_TOKENS)

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens of the trial: causal layers meet shorter sequences in decoding."""
        return [self.tokens, self.tokens // 2 + 1] if self.is_causal else [self.tokens]

    def draw(self, tokens: int) -> Tensor:
        return torch.randn(2, tokens, self.use.dim)

    def redraw(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)

    def call(self, x: Tensor, present: Tensor | None = None) -> Tensor:
        mask = None if present is None else present[:, None, None, :]
        if self.module.training:
            torch.manual_seed(self.seed)
        try:
            return self.compute(x, mask)
        except ConfigError:
            raise
        except Exception as error:
            # Code of a user can raise any exception.
            shape = " x ".join(str(side) for side in x.shape)
            raise ConfigError(
                explain_failure(error, f"attention: {self.name}, for tokens {shape}")
            ) from error

    def compute(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs of the layer."""
        output: Tensor = self.module(x, mask, self.is_causal)
        return output

    def refuse(self, reason: str, region: Region = ()) -> ConfigError:
        mode = " in training" if self.module.training else ""
        return ConfigError(f"attention: {self.name}:{mode} {reason}")

    def check_output(self, output: Tensor, is_half: bool = False) -> None:
        """Require finite numbers and, without autocast, the type of the tokens."""
        if not is_half and output.dtype != self.x.dtype:
            raise self.refuse(f"returns {output.dtype} for tokens of {self.x.dtype}")
        if not output.isfinite().all():
            place = " in bfloat16 (training.precision)" if is_half else ""
            raise self.refuse(f"returns numbers that are not finite{place}")

    def check_repeat(self) -> None:
        """Require that the same inputs have the same outputs in evaluation."""
        if not torch.equal(self.call(self.x), self.output):
            raise self.refuse("two evaluations of one input differ; it must be deterministic")

    def check_length(self) -> None:
        """Require that the first tokens alone have the same outputs; decoding relies on it."""
        tokens = self.x.shape[1]
        first = tokens // 2
        if differ(self.call(self.x[:, :first]), self.output[:, :first]):
            raise self.refuse(
                f"the first {first} of {tokens} tokens have other outputs without the later "
                "tokens, so decoding would differ; let no weight depend on the number of tokens"
            )

    def check_padding(self) -> None:
        """Require that tokens of padding change no other output."""
        tokens = self.x.shape[1]
        present = torch.ones(2, tokens, dtype=torch.bool)
        present[1, tokens // 2 :] = False
        changed = self.x.clone()
        changed[~present] = torch.randn_like(changed[~present])
        output = self.call(self.x, present)
        if differ(self.call(changed, present)[present], output[present]):
            raise self.refuse(f"the data have padding, {self.explain_padding()}")

    def explain_padding(self) -> str:
        """Return what padding does that it must not do."""
        return "which changes the outputs of other tokens"

    def check_modes(self) -> None:
        """Try out the layer in evaluation and in training, with each length."""
        with torch.no_grad():
            for is_training in (False, True):
                self.module.train(is_training)
                for tokens in self.lengths:
                    self.start(tokens)
                    self.check_output(self.output)
                    if not is_training:
                        self.check_repeat()
                    self.check_dependence()
                    if not is_training and self.is_causal:
                        self.check_length()
                    if self.use.has_padding:
                        self.check_padding()


class PartsTrial(LayerTrial):
    """Trial of an attention layer with the parts of a user in `families`."""

    module: Any

    def __init__(self, use: Use, families: list[str]) -> None:
        super().__init__(use)
        layer_class: Any = attn_layer(use.spec, local_self_attention=use.is_local)
        self.module = layer_class(use.dim, use.heads)
        self.source: nn.Module | None = None
        if use.spec.values.reads_first or use.spec.shares_keys:
            # The layer reads values or keys of an earlier layer.
            own_keys = use.spec.model_copy(update={"kv_from": "own"})
            self.source = attn_layer(own_keys)(use.dim, use.heads)
            number_layers(nn.ModuleList([self.source, self.module]))
        else:
            number_layers(self.module)
        add_noise(self.module)
        self.memory = torch.randn(2, self.tokens, use.dim) if use.is_cross else None
        self.name = " and ".join(self._name_part(family) for family in families)

    def _name_part(self, family: str) -> str:
        """Return the name of a part with class, file and line of its module."""
        composers = list(self.module.composers.values()) if family == "compose" else []
        module = composers[0] if composers else getattr(self.module, family)
        kind = self.use.spec.parts[family].kind
        return f"{family} '{kind}' ({name_class(type(module))})"

    def compute(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.source is not None:
            self.source(x, mask, self.is_causal)
        memory = None if self.memory is None else self.memory[: len(x)]
        output: Tensor = self.module(x, mask, self.is_causal, memory=memory)
        return output

    def run(self) -> None:
        """Try out everything that a causal or another model needs."""
        self.check_modes()


class MixerTrial(LayerTrial):
    """Trial of a layer of `kind: module`."""

    module: Any

    def __init__(self, use: Use) -> None:
        super().__init__(use)
        # Its class is that of a layer of `kind: module`.
        self.module = attn_layer(use.spec)(use.dim, use.heads).eval()
        self.name = self.module.name

    def run(self, precision: str) -> None:
        """Try out everything that the model needs, training in `precision` included."""
        if self.module.is_causal_only and not self.is_causal:
            raise self.refuse("is causal only, but this model does not use it in causal order")
        self.check_modes()
        self.module.eval()
        if self.is_causal:
            self.check_cache()
        self.module.train()
        self.check_gradients()
        if precision != "fp32":
            with torch.no_grad(), torch.autocast(self.x.device.type, torch.bfloat16):
                self.check_output(self.call(self.x), is_half=True)

    def explain_order(self) -> str:
        advice = "let `forward` take `is_causal`, or choose a causal layer"
        return f"{super().explain_order()}; {advice}"

    def explain_padding(self) -> str:
        return (
            f"{super().explain_padding()}; let `forward` take `present` (B, n), False where a "
            "token is padding"
        )

    @torch.no_grad()
    def check_cache(self) -> None:
        """Require that the layer's own cache gives the outputs of the complete sequence."""
        cache = self.module.new_cache()
        if isinstance(cache, InputCache):
            # It computes all tokens again, as check_length has done.
            return
        self.start(self.tokens)
        half = self.tokens // 2
        bounds = [0, half, *range(half + 1, self.tokens + 1)]
        try:
            parts = [
                self.module(self.x[:, start:stop], None, True, cache=cache)
                for start, stop in pairwise(bounds)
            ]
        except Exception as error:
            # Code of a user can raise any exception.
            raise ConfigError(
                explain_failure(error, f"attention: {self.name}, with its cache")
            ) from error
        if differ(torch.cat(parts, 1), self.output):
            raise self.refuse("with its cache, it computes other outputs than without")

    def check_gradients(self) -> None:
        """Require a finite gradient for the tokens and for every trained parameter."""
        x = self.draw(self.tokens).requires_grad_()
        output = self.call(x)
        if not output.requires_grad:
            raise self.refuse("its output has no gradient")
        (output * torch.randn_like(output)).sum().backward()
        gradients = {"its tokens": x.grad}
        for name, parameter in self.module.layer.named_parameters():
            if parameter.requires_grad:
                gradients[f"its parameter `{name}`"] = parameter.grad
        for name, gradient in gradients.items():
            if gradient is None:
                raise self.refuse(f"its output does not depend on {name}")
            if not gradient.isfinite().all():
                raise self.refuse(f"the gradient of {name} is not finite")
