"""One call of a layer: its projected tokens, and everything that acts on their weights.

Shapes: B batch, n queries, m tokens of the memory, d width, H heads, H' key heads, M keys for every
token, D head width.
"""

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from lit_attn.attention.cache import Cache
from lit_attn.attention.compose import Composer
from lit_attn.attention.filters import Filter
from lit_attn.attention.masks import Masks
from lit_attn.attention.normaliser import Normaliser
from lit_attn.attention.precision import wide
from lit_attn.attention.shared_keys import KeysValues


class Inputs(NamedTuple):
    """One call of a layer: its projected tokens, and everything that acts on their weights.

    x (B, n, d), q (B, H, n, D), keys (B, H', M, n, D), v (B, n, H', D), z (B, H, n, D). Keys and
    values are those of `memory`: x itself, or in cross-attention m other tokens (B, m, d).
    `temperature` is the logarithm of the logits' learned factor, and `factor` (B or 1, H, n, 1) a
    factor of the logits of each query. `cache` holds the tokens before x. Where layers share keys
    and values, `all_tokens` are those of the cached tokens and of x; with `is_absorbed` they are
    latents (lit_attn.attention.latent), and `v` the values of x alone.
    """

    x: Tensor
    memory: Tensor
    q: Tensor
    keys: Tensor
    v: Tensor
    z: Tensor | None
    masks: Masks
    composers: nn.ModuleDict
    normaliser: Normaliser
    filter: Filter
    temperature: Tensor | None = None
    factor: Tensor | None = None
    dropout: float = 0.0
    cache: Cache | None = None
    all_tokens: KeysValues | None = None
    is_absorbed: bool = False

    def shared(self, x: Tensor, axis: int = 1) -> Tensor:
        """Repeat x of the key heads, along the `axis` of heads, for the heads that share them."""
        heads_of_a_group = self.q.shape[1] // x.shape[axis]
        if heads_of_a_group == 1:
            return x
        return x.repeat_interleave(heads_of_a_group, axis)

    def widened(self) -> "Inputs":
        """Return the call with all tensors of tokens in float32 or wider."""
        x = wide(self.x)
        all_tokens = self.all_tokens
        if all_tokens is not None:
            all_tokens = KeysValues(wide(all_tokens.keys), wide(all_tokens.values))
        return self._replace(
            x=x,
            memory=x if self.memory is self.x else wide(self.memory),
            q=wide(self.q),
            keys=wide(self.keys),
            v=wide(self.v),
            z=None if self.z is None else wide(self.z),
            all_tokens=all_tokens,
        )

    def maps(self) -> dict[str, dict[str, Any]]:
        """Return the composers' maps by place and side: "query" of x and "key" of the memory."""
        is_cross = self.memory is not self.x
        maps = {}
        for place, part in self.composers.items():
            composer = cast(Composer, part)
            sides = composer.maps(self.x)
            if is_cross and "key" in sides:
                sides["key"] = composer.maps(self.memory)["key"]
            maps[place] = sides
        return maps
