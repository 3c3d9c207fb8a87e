"""muP: initial values and learning rates that keep a good rate good when the width changes.

Yang et al. 2022, "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
Transfer", https://arxiv.org/abs/2203.03466, Table 8 for tied output weights, and Table 3, which is
equal to it for Adam, for untied ones.

A model is compared with its base model, which has the same depth and other widths: a matrix whose
number of inputs is m times as large has 1 / m of Adam's rate. Its initial values are multiplied by
1 / sqrt(m), or by 1 / m if its number of outputs stays (output weights). The base model has the
initial values and rates that are written.
"""

import math
from abc import abstractmethod
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, PositiveInt
from torch import nn

from lit_attn.attention.mixer import TokenMixer
from lit_attn.attention.scale import FixedScaleConfig
from lit_attn.attention.spec import AttentionSpec
from lit_attn.models.base import PackageModel, require_division, require_heads
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import outside_composers
from lit_attn.schema.base import Config, consistency_check


class BaseSizes(Config):
    """Sizes of the base model, whose initial values and learning rates are those that are written.

    Its FFN has the same ratio to the width.
    """

    dim: PositiveInt = Field(description="width of the base model")
    heads: PositiveInt | None = Field(
        None,
        description="heads of the base model; null: heads of the same width as in this model",
    )


class WidthScaled(PackageModel):
    """Base of the models whose initial values and learning rates can follow their width."""

    mup: BaseSizes | None = Field(
        None,
        description="muP: base model from which initial values and learning rates follow the "
        "width; null: they do not depend on the width",
    )

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        if self.mup is None:
            return super().build(signature, device)
        network = self.without_mup(self.logit_factor()).build(signature, device)
        base = self.base_model().build(signature, "meta")
        scale_to_width(network, base)
        self.scale_output(network)
        return network

    def scale_output(self, network: Any) -> None:
        """Scale logits whose weights are those of an embedding; a model without them has none."""

    @abstractmethod
    def find_mup_problem(self) -> str:
        """Return why initial values of this model cannot follow its width, or an empty text."""

    def logit_factor(self) -> float:
        """Return the factor that turns 1 / sqrt(D) of the logits into sqrt(base D) / D."""
        base_model = self.base_model()
        return math.sqrt(width_of_heads(base_model) / width_of_heads(self))

    def without_mup(self, factor: float = 1.0) -> Self:
        """Return the model without muP, with attention logits multiplied by `factor`."""
        attention = self.attention
        if factor != 1:
            attention = scale_logits(attention, factor)
        return self.model_copy(update={"mup": None, "attention": attention})

    def base_model(self) -> Self:
        """Return the model of the base sizes, without muP."""
        assert self.mup is not None
        sizes: Any = self
        heads = self.mup.heads or sizes.heads * self.mup.dim // sizes.dim
        update: dict[str, Any] = {"dim": self.mup.dim, "heads": heads, "mup": None}
        if self.ffn is not None:
            width = max(1, round(self.ffn.width * self.mup.dim / sizes.dim))
            update["ffn"] = self.ffn.model_copy(update={"width": width})
        return self.model_copy(update=update)

    @consistency_check
    def _has_a_base(self) -> None:
        """Refuse base sizes that no model can have, and initial values that know the width."""
        if self.mup is None:
            return
        sizes: Any = self
        if self.mup.heads is None and sizes.heads * self.mup.dim % sizes.dim:
            raise ValueError(
                f"mup.dim: {sizes.heads} heads of a width of {sizes.dim} have no counterpart in a "
                f"width of {self.mup.dim}; set mup.heads"
            )
        problem = self.find_mup_problem()
        if problem:
            raise ValueError(f"mup: {problem}")
        base_model: Any = self.base_model()
        if getattr(self, "head_dim", None) is None:
            name = f"mup.dim {base_model.dim}"
            require_division("mup.heads", "heads", base_model.heads, base_model.dim, name)
        require_heads(self.attention, base_model.heads, sizes.depth)
        if width_of_heads(self.base_model()) == width_of_heads(self):
            return
        for spec in self.attention.mechanisms:
            if spec.mixer is None and spec.scale.kind != "none":
                raise ValueError(
                    f"mup.heads: the width of heads differs from the base, and scale: "
                    f"'{spec.scale.kind}' multiplies the logits already; remove mup.heads"
                )


def width_of_heads(model: Any) -> int:
    """Return the width D of the heads of a model."""
    width: int = getattr(model, "head_dim", None) or model.dim // model.heads
    return width


def scale_logits(spec: AttentionSpec, factor: float) -> AttentionSpec:
    """Return `spec` with the factor in all mechanisms that have logits of attention."""
    update: dict[str, Any] = {}
    if spec.layers is not None:
        update["layers"] = tuple(
            rule.model_copy(update={"use": scale_logits(rule.use, factor)}) for rule in spec.layers
        )
    if spec.mixer is None and spec.similarity.has_logits:
        update["scale"] = FixedScaleConfig(factor=factor)
    return spec.model_copy(update=update)


class Growth(NamedTuple):
    """Factors by which the inputs and the outputs of a matrix exceed those of the base model."""

    inputs: float
    outputs: float

    @property
    def rate(self) -> float:
        """Factor of Adam's learning rate."""
        return 1 / self.inputs

    @property
    def initial(self) -> float:
        """Factor of the initial values."""
        return 1 / self.inputs if self.outputs == 1 else self.inputs**-0.5


def scale_to_width(network: nn.Module, base: nn.Module) -> None:
    """Scale the initial values of `network`, in place, and give it the factors of its rates.

    The optimiser reads the attribute `lr_scales`: factors by the name of a parameter. Raises
    ValueError for a parameter with two axes that grow and that is no projection.
    """
    base_shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    modules = dict(network.named_modules())
    drawn = outside_composers(network)
    kept: set[str] = set()
    for path, module in modules.items():
        if isinstance(module, TokenMixer):
            # A layer of a user has its own initial values.
            kept.update(f"{path}.{name}" for name, _ in module.named_parameters())
    rates: dict[str, float] = {}
    for name, parameter in network.named_parameters():
        owner = name.rpartition(".")[0]
        growth = find_growth(name, modules[owner], parameter.shape, base_shapes[name])
        if growth is None or growth.inputs == 1:
            continue
        rates[name] = growth.rate
        if owner in drawn and name not in kept and not parameter.is_meta:
            with torch.no_grad():
                parameter.mul_(growth.initial)
    network.lr_scales = rates  # type: ignore[assignment]


def find_growth(
    name: str, owner: nn.Module, shape: torch.Size, base_shape: torch.Size
) -> Growth | None:
    """Return the growth of a matrix, or None for vectors and embeddings, which keep their rate."""
    ratios = [size / base for size, base in zip(shape, base_shape, strict=True)]
    if isinstance(owner, nn.Linear) and len(shape) == 2:
        return Growth(inputs=ratios[1], outputs=ratios[0])
    growing = [ratio for ratio in ratios if ratio != 1]
    if len(growing) > 1:
        raise ValueError(
            f"mup: {name} of shape {tuple(shape)} grows in {len(growing)} axes and is no "
            "projection, so its learning rate is not known; choose another mechanism"
        )
    return None
