"""Base of the parts of an attention layer.

Each family has a file: similarity, mixture and linear (logits), compose (heads), normaliser
(weights), residual, transform and convolution (q, k, v), first_values, scale, bias, pairs
(queries), filters and multi_token (matrices of logits), gate. A file has the configuration of each
member, its formula (`reference`, slow and in float64) and its module (`build`).

Notation: n tokens, width d, H heads of width D = d / H; per head q, k, v, z of shape (n, D); H_m
the head's weighted sum of v; MH = concat of H_m and V = concat of v over heads, both (n, d).
"""

from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from lit_attn.schema.base import Config
from lit_attn.schema.errors import ConfigError


class LayerShape(NamedTuple):
    """Sizes of the layer that a part is built for, and the options of its parameters.

    `key_heads` is H, or the number of groups of heads that share keys and values. `needs_row_terms`
    is True if a term that is equal for all keys of a query changes the layer's output: the
    similarity must then include these terms in its logits. `options` are the `device` and `dtype`
    of parameters.
    """

    dim: int
    dim_out: int
    heads: int
    key_heads: int
    head_dim: int
    qkv_bias: bool
    proj_bias: bool
    needs_row_terms: bool
    options: dict[str, Any]


class HeadMixing(Protocol):
    """Choice of the part that mixes the heads (lit_attn.attention.compose)."""

    def places(self) -> tuple[str, ...]:
        """Return the places of mixing: "pre" (before the normaliser), "post" (after it) or both."""


class LayerChoices(Protocol):
    """Choices of a complete layer, as one of its parts sees them (lit_attn.attention.spec)."""

    @property
    def similarity(self) -> "Part":
        """Part that computes the logits."""

    @property
    def compose(self) -> HeadMixing:
        """Part that mixes the heads."""

    @property
    def normaliser(self) -> "Part":
        """Part that turns logits into weights."""

    @property
    def zz(self) -> bool | Literal["like-k"]:
        """True if a second inner product is added to the logits."""

    @property
    def window(self) -> int | None:
        """Number of keys that a query sees, or None without a window."""

    @property
    def parts(self) -> "dict[str, Part]":
        """Chosen member of each family, by the family's key."""


class Part(Config):
    """Configuration of one part of a layer: how it is built, and with what it can be combined.

    A member overrides `build` and `reference`.
    """

    needs_self: ClassVar[str] = ""
    """Why the part has no meaning in cross-attention; empty if it has one."""
    needs_order: ClassVar[str] = ""
    """Use of the order of the tokens; empty if the part has a meaning without order."""
    kind: str = ""

    def build(self, shape: LayerShape) -> Any:
        """Return the torch module that computes this part in a layer of `shape`."""
        raise NotImplementedError

    def reference(self, module: Any, *inputs: Any, **named: Any) -> Any:
        """Return the value of this part's formula, with the parameters of `module`.

        The family's docstring names the inputs. Raises ConfigError if the part has no formula.
        """
        raise ConfigError(
            f"'{self.kind}' cannot be compared with its formula: "
            f"its class {type(self).__name__} needs a method `reference` "
            "(docs/adding-a-part.md)"
        )

    def find_document_problem(self) -> str:
        """Return how packed documents affect each other although a mask separates them, or ""."""
        return ""

    def find_own_keys_use(self) -> str:
        """Return what the part does with projected keys or values of its layer, or "".

        A layer that shares those of another layer has none.
        """
        return ""

    def exempt_parameters(self) -> tuple[str, ...]:
        """Return the parameters of the module that have no weight decay with `decay: weights`.

        Only parameters of two or more axes need to be named: scales, positions, gates and priors.
        Vectors and biases never decay with this rule.
        """
        return ()

    def stacked_vectors(self) -> tuple[str, ...]:
        """Return the parameters of the module whose rows are vectors in the released code.

        They have no weight decay with `decay: matrices` and `decay: weights`.
        """
        return ()

    def check(self, layer: "LayerChoices") -> None:
        """Raise ValueError if this part cannot be combined with the other parts of `layer`."""

    def check_heads(self, heads: int) -> None:
        """Raise ValueError if this part cannot be used in a layer of `heads` heads."""
