"""Base class of the model configurations, and the checks that they share."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, PositiveInt, field_validator
from torch import nn

from lit_attn.attention.layer import TokenLayer
from lit_attn.attention.layer_spec import MixerConfig
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.layers import Device
from lit_attn.schema.base import Config, Kind
from lit_attn.schema.errors import ConfigError, find_nearest_divisor, require, suggest
from lit_attn.signatures import ImageSignature, Signature


class HiddenWidth(Config):
    """Feed-forward network as `match: parameters` sees it."""

    width: PositiveInt | None


class FFN(HiddenWidth):
    """Feed-forward network of a block: Linear, activation, Linear.

    `gelu-tanh` is the tanh approximation of GELU, and `relu2` is max(0, x)^2 (So et al. 2021,
    "Primer", https://arxiv.org/abs/2109.08668). The gated ones (Shazeer 2020,
    https://arxiv.org/abs/2002.05202) are down(f(gate(x)) * up(x)): `swiglu` with f = SiLU, `geglu`
    with GELU and `reglu` with ReLU.
    """

    width: PositiveInt = Field(description="hidden units; `match: parameters` solves for them")
    activation: Literal[
        "gelu", "gelu-tanh", "relu", "relu2", "silu", "hard-swish", "swiglu", "geglu", "reglu"
    ] = Field("gelu", description="nonlinearity between the Linears")


FFN_MEANING = "feed-forward network of every block; null (or `none`): no FFN and no norm of it"


def ffn_field(width: int, activation: str = "gelu") -> Any:
    """Return the field `ffn` with a default width."""
    default = FFN.model_validate({"width": width, "activation": activation})
    return Field(default, description=FFN_MEANING)


class LayerCount(NamedTuple):
    """Number of attention layers of a network, and how many of them are of this package."""

    replaced: int
    total: int


class Model(Kind):
    """Family of the models: networks with attention layers.

    A member defines `kind`, `takes`, its own keys and `build`. `ffn: none` drops the FFN together
    with its norm. A member without an FFN redefines the key as `ffn: FFN | None = None`.
    """

    takes: ClassVar[tuple[type[Signature], ...]]
    """Signature types of the data that the model can be trained on."""

    activations: ClassVar[tuple[str, ...]] = ("gelu",)
    """Activations that the FFN can have."""

    has_own_network: ClassVar[bool] = False
    """True if a user has written the network: smoke tries whether its tokens see later ones."""

    attention: AttentionSpec = Field(AttentionSpec(), description="attention layer of every block")
    ffn: HiddenWidth | None = Field(description=FFN_MEANING)

    @abstractmethod
    def build(self, signature: Any, device: Device = None) -> nn.Module:
        """Return the network for data with `signature`, which is of a type in `takes`.

        Its parameters are on `device` and initialised, except on "meta", where nothing is
        allocated. Raises ValueError if parts of the model do not go together.
        """

    def check(self, signature: Any) -> None:
        """Raise ValueError, which begins with the key, if the model cannot have such data.

        This is the place for conditions on both, for example that patches tile the images.
        """

    def check_files(self) -> None:
        """Raise ConfigError, which begins with `model.` and the key, if a file is missing."""
        path = getattr(self, "checkpoint", None)
        if isinstance(path, Path) and not path.is_file():
            raise ConfigError(f"model.checkpoint: no file {path}")

    def count_layers(self, network: nn.Module) -> LayerCount:
        """Count the attention layers of `network`, which `build` has returned.

        They are layers of this package. A model with attention layers of other packages overrides
        this method, so that a dry run and the table say how many layers have its mechanism.
        """
        inside: set[nn.Module] = set()
        count = 0
        for module in network.modules():
            if isinstance(module, TokenLayer) and module not in inside:
                count += 1
                # A layer of a user can contain layers of this package.
                inside.update(module.modules())
        return LayerCount(count, count)

    def exempt_parameters(self) -> tuple[str, ...]:
        """Return the parameters that `decay: weights` exempts and that earlier versions decayed.

        They belong to the identity of a cell with this rule, because its results differ. Those of
        the parts of the attention layers are added.
        """
        return ()

    def try_out(self, signature: Any) -> Any:
        """Return the output of the network for one sample, on the meta device."""
        # Parameters that the code of a model creates without a device are on meta too.
        with torch.device("meta"):
            network = self.build(signature, "meta")
        # In training mode a batch norm would refuse a single sample.
        return network.eval()(*signature.sample())

    def with_width(self, width: int) -> Self:
        """Return the model with an FFN of `width` hidden units; the model must have an FFN."""
        assert self.ffn is not None
        return self.model_copy(update={"ffn": self.ffn.model_copy(update={"width": width})})

    @field_validator("ffn")
    @classmethod
    def _has_activation(cls, ffn: HiddenWidth | None) -> HiddenWidth | None:
        """Refuse an activation that the model does not have."""
        if isinstance(ffn, FFN):
            require("this model has no activation", ffn.activation, cls.activations)
        return ffn

    @field_validator(
        "ffn",
        mode="before",
        json_schema_input_type=FFN | HiddenWidth | Literal["with", "without", "none"] | None,
    )
    @classmethod
    def _read_word(cls, value: Any) -> Any:
        """Return None for the words that stand for no FFN."""
        if not isinstance(value, str):
            return value
        if value not in ("without", "none"):
            raise ValueError(f"unknown '{value}'{suggest(value, ['with', 'without', 'none'])}")
        return None


class PackageModel(Model):
    """Base of the models that are built by a function or class from fields of the signature."""

    builder: ClassVar[tuple[Any, ...]]
    """The function or class, and the fields of the signature that it takes after the model."""

    ffn: FFN | None = Field(description=FFN_MEANING)

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        self.check(signature)
        function, *fields = self.builder
        values = [getattr(signature, field) for field in fields]
        network: nn.Module = function(self, *values, device)
        return network


def find_specs(model: Model) -> list[AttentionSpec]:
    """Return the choices of attention of `model`, such as `attention` and `cross_attention`."""
    return [value for _, value in model if isinstance(value, AttentionSpec)]


def find_mixers(model: Model) -> list[MixerConfig]:
    """Return the layers of users in `model`."""
    mixers: list[MixerConfig] = []
    for choice in find_specs(model):
        mixers += [spec.mixer for spec in choice.mechanisms if spec.mixer is not None]
    return mixers


def require_division(key: str, noun: str, number: int, total: int, total_name: str) -> None:
    """Raise ValueError, which names the nearest divisor, if `number` does not divide `total`."""
    if total % number:
        raise ValueError(
            f"{key}: {number} {noun} do not divide {total_name};"
            f" the nearest that do are {find_nearest_divisor(number, total)}"
        )


def require_heads(attention: AttentionSpec, heads: int, depth: int | None = None) -> None:
    """Raise ValueError if a layer of `heads` heads cannot have the parts of `attention`.

    With `depth`, the number of layers must be one that `attention.layers` can be for.
    """
    try:
        if depth is not None:
            attention.by_layer(depth)
        for spec in attention.mechanisms:
            spec.check_heads(heads)
    except ValueError as error:
        raise ValueError(f"attention.{error}") from error


def require_tiling(
    patch: int, sizes: Iterable[tuple[int, int]], noun: str = "images", source: str = ""
) -> None:
    """Raise ValueError if patches of `patch` pixels do not tile images of all `sizes` (H, W)."""
    for height, width in sizes:
        if height % patch or width % patch:
            nearest = find_nearest_divisor(patch, math.gcd(height, width))
            raise ValueError(
                f"patch: patches of {patch} do not tile {noun} of {height} x {width}{source};"
                f" the nearest that do are of {nearest}"
            )


def require_one_size(kind: str, signature: ImageSignature) -> None:
    """Raise ValueError if training images change in size."""
    if getattr(signature, "training_sizes", ()):
        raise ValueError(f"'{kind}' has positions for images of one size, not `data.sizes`")
