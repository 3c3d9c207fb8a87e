"""Short causal convolutions over the tokens, on q, k and v or on the output of the layer.

Allen-Zhu 2025, "Physics of Language Models: Part 4.1", https://arxiv.org/abs/2512.17351, has them
with a skip connection (Canon B, on q, k and v); linear attentions have them without one and with
SiLU (`ShortConvolution` of github.com/fla-org/flash-linear-attention).

Shapes: B batch, n tokens, H heads, H' key heads, D head width, C components, w width.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.parts import LayerChoices, LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind


class ConvolutionConfig(Part, Kind):
    """Family of the convolutions over neighbouring tokens.

    `build` returns a lit_attn.attention.convolution.Convolution. The inputs of `reference` are the
    name of the vectors ("q", "k", "v" or "output"), the vectors (B, n, C), and which tokens are not
    padding, (B or 1, n) or None; it returns the vectors after their convolution.
    """


class Convolution(nn.Module):
    """Base of the convolutions: `forward(name, x, present, cache)` returns x after its convolution.

    x (B, n, C) are q, k and v after their maps and before their norms, or the layer's output.
    `present` (B or 1, n) is False where a token is padding, or None. `cache` is that of the layer.
    """

    is_identity = False
    """True if all vectors are unchanged."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def mix_heads(
        self, q: Tensor, k: Tensor, v: Tensor, present: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, n, H, D), k and v (B, n, H', D) after their convolutions."""
        mixed = []
        for name, vectors in (("q", q), ("k", k), ("v", v)):
            convolved = self(name, vectors.flatten(-2), present, cache)
            mixed.append(convolved.unflatten(-1, vectors.shape[-2:]))
        return mixed[0], mixed[1], mixed[2]

    def parameters_of_weights(self) -> list[Tensor]:
        """Return the parameters that change only the attention weights, not the values."""
        return []


class NoConvolutionConfig(ConvolutionConfig, kind="none"):
    """Unchanged vectors."""

    def build(self, shape: LayerShape) -> Any:
        return NoConvolution(self, shape)

    def reference(self, module: Any, name: str, x: Tensor, present: Tensor | None) -> Tensor:
        return x


class NoConvolution(Convolution):
    """Unchanged vectors."""

    is_identity = True

    def forward(self, name: str, x: Tensor, present: Tensor | None, cache: Cache | None) -> Tensor:
        return x


class ShortConvolutionConfig(ConvolutionConfig, kind="short"):
    """x_t + sum of u_s x_(t - s) over s = 0 to w - 1, for each component on its own (Canon).

    Allen-Zhu 2025, https://arxiv.org/abs/2512.17351, section 2, whose Canon B is `on: qkv`. Without
    `skip` and with `activation: silu` it is the convolution of flash-linear-attention. It reads
    earlier tokens in every order of attention, and tokens that are padding are zero. The weights
    start uniform within 1 / sqrt(w), as in both codes.
    """

    needs_self = "reads neighbouring tokens of one sequence"
    needs_order = "reads the tokens before each one"
    width: int = Field(4, ge=2, le=64, description="tokens that are read, each one's own included")
    on: Literal["qkv", "q", "k", "v", "kv", "output"] = Field(
        "qkv", description="vectors that have a convolution; output: the result of the layer"
    )
    skip: bool = Field(True, description="add the convolution to its input")
    activation: Literal["none", "silu"] = Field(
        "none", description="nonlinearity after the convolution"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the vectors that have a convolution."""
        return ("output",) if self.on == "output" else tuple(self.on)

    def check(self, layer: LayerChoices) -> None:
        if self.on in ("q", "k") and layer.parts["residual"].kind == "value":
            raise ValueError(
                f"convolution.on: {self.on} has no effect, because `residual: value` does not use "
                "the attention weights; choose v or output"
            )

    def find_own_keys_use(self) -> str:
        return "" if self.on == "output" else "is of q, k or v"

    def find_document_problem(self) -> str:
        return "reads the last tokens of the document before"

    def build(self, shape: LayerShape) -> Any:
        return ShortConvolution(self, shape)

    def reference(self, module: Any, name: str, x: Tensor, present: Tensor | None) -> Tensor:
        """Allen-Zhu 2025, section 2: token by token, and offset by offset."""
        part = module.part
        if name not in part.names:
            return x
        if present is not None:
            x = x * present.unsqueeze(-1)
        tokens = []
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[:, t])
            for s in range(min(part.width, t + 1)):
                # The last weight is that of the token itself.
                total = total + module.weights[name][:, 0, part.width - 1 - s] * x[:, t - s]
            if part.activation == "silu":
                total = total / (1 + torch.exp(-total))
            tokens.append(x[:, t] + total if part.skip else total)
        return torch.stack(tokens, dim=1)


class ShortConvolution(Convolution):
    """Depthwise convolution over each token and the w - 1 tokens before it."""

    def __init__(self, part: ShortConvolutionConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        components = {
            "q": shape.heads * shape.head_dim,
            "k": shape.key_heads * shape.head_dim,
            "v": shape.key_heads * shape.head_dim,
            "output": shape.dim_out,
        }
        self.weights = nn.ParameterDict()
        for name in part.names:
            weight = torch.empty(components[name], 1, part.width, **shape.options)
            self.weights[name] = nn.Parameter(weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly within 1 / sqrt(w)."""
        bound = self.part.width**-0.5
        for weight in self.weights.values():
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, name: str, x: Tensor, present: Tensor | None, cache: Cache | None) -> Tensor:
        if name not in self.weights or x.numel() == 0:
            return x
        if present is not None:
            x = x * present.unsqueeze(-1)
        earlier = self.part.width - 1
        if cache is None:
            padded = F.pad(x, (0, 0, earlier, 0))
        else:
            padded = self._with_cached_tokens(name, x, cache)
        # Products of elements are equal in every piece of a sequence, unlike those of `conv1d`.
        n = x.shape[1]
        weights = wide(self.weights[name])
        mixed = weights[:, 0, 0] * padded[:, :n]
        for place in range(1, self.part.width):
            mixed = mixed + weights[:, 0, place] * padded[:, place : place + n]
        if self.part.activation == "silu":
            mixed = F.silu(mixed)
        return (x + mixed if self.part.skip else mixed).to(x.dtype)

    def _with_cached_tokens(self, name: str, x: Tensor, cache: Cache) -> Tensor:
        """Return the last w - 1 cached vectors and x, and store the last w - 1 of both."""
        key = f"convolution {name}"
        earlier = self.part.width - 1
        stored = cache.totals.get(key)
        if stored is None:
            stored = x.new_zeros(x.shape[0], earlier, x.shape[-1])
        padded = torch.cat([stored, x], dim=1)
        cache.totals[key] = padded[:, padded.shape[1] - earlier :].clone()
        return padded

    def parameters_of_weights(self) -> list[Tensor]:
        return [weight for name, weight in self.weights.items() if name in ("q", "k")]
