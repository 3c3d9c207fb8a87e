"""Multi-token attention: convolutions of logits and weights over queries and keys, and head maps.

Golovneva et al. 2025, "Multi-Token Attention", https://arxiv.org/abs/2504.00927, section 3, in the
form of its released code (facebookresearch/RAM, projects/mta).

Shapes: B batch, H heads, D head width, n queries, m keys, C_q and C_k sizes of a kernel, C_h heads
of a group.
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache
from lit_attn.attention.filters import ActiveFilterConfig, Filter
from lit_attn.attention.masks import Masks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import wide, without_autocast
from lit_attn.schema.base import consistency_check
from lit_attn.schema.errors import find_nearest_divisor

# Added to the mean square in the RMSNorm of the heads (the released code's value).
HEAD_NORM_EPS = 1e-5


class MultiTokenConfig(ActiveFilterConfig, kind="multi-token"):
    """Convolutions of logits and of weights over queries and keys, with maps of the heads.

    Golovneva et al. 2025, "Multi-Token Attention", https://arxiv.org/abs/2504.00927, section 3, as
    in the released code: each head has a kernel over the last queries and the keys around a key; an
    H x H map mixes the heads' logits, and one map of each group of heads the weights; the heads
    then have an RMSNorm with shared weights and a gate sigmoid(h w + b). The paper multiplies the
    norm by a factor of the layer instead of the gate: `gate: false, rescale: depth`. If `weights`,
    `head_maps`, `norm` and `gate` are false, it is the layer of the paper's toy task.
    """

    queries: int = Field(6, ge=1, description="queries of a kernel: the query and those before it")
    keys: int = Field(11, ge=1, description="keys of a kernel, an odd number, around the key")
    weights: bool = Field(True, description="convolve and map the weights as well as the logits")
    head_maps: bool = Field(True, description="mix the logits, or weights, of the heads by maps")
    group: PositiveInt | None = Field(
        None, description="heads whose weights are mixed with each other; null: all"
    )
    norm: bool = Field(True, description="RMSNorm of each head's weighted sum")
    rescale: Literal["none", "depth"] = Field(
        "none",
        description="factor of the norm; depth: 0.2 + 0.6 exp(-0.3 l) in layer l, from 0",
    )
    gate: bool = Field(True, description="multiply each head by a gate from the head itself")

    @consistency_check
    def _has_a_middle_key(self) -> None:
        if self.keys % 2 == 0:
            raise ValueError(f"keys: {self.keys} keys have no middle; choose an odd number")

    @consistency_check
    def _options_have_an_effect(self) -> None:
        if self.group is not None and not (self.weights and self.head_maps):
            raise ValueError("group: needs maps of the weights; remove it")
        if self.rescale != "none" and not self.norm:
            raise ValueError("rescale: multiplies the norm; write `norm: true` or remove it")

    def check_heads(self, heads: int) -> None:
        if self.group is not None and heads % self.group:
            raise ValueError(
                f"filter.group: groups of {self.group} heads do not divide {heads} heads; "
                f"the nearest that do have {find_nearest_divisor(self.group, heads)}"
            )

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("logit_kernel", "weight_kernel", "logit_heads", "weight_heads")

    def build(self, shape: LayerShape) -> Any:
        return MultiToken(self, shape)

    def reference(
        self, module: Any, logits: Tensor, visible: Tensor, present: Tensor | None
    ) -> Tensor:
        """Golovneva et al. 2025, section 3: convolution of each head, then map of the heads."""
        convolved = convolve_pairs(
            set_hidden_to_zero(logits, visible, present), module.logit_kernel
        )
        if not self.head_maps:
            return convolved
        return torch.einsum("gh,bhij->bgij", module.logit_heads, convolved)

    def reference_weights(
        self, module: Any, weights: Tensor, visible: Tensor, present: Tensor | None
    ) -> Tensor:
        """Golovneva et al. 2025, section 3: the same of the weights, with maps of groups."""
        if not self.weights:
            return weights
        convolved = convolve_pairs(
            set_hidden_to_zero(weights, visible, present), module.weight_kernel
        )
        convolved = convolved.masked_fill(~visible, 0)
        if not self.head_maps:
            return convolved
        group = module.weight_heads.shape[-1]
        mixed = []
        for number, matrix in enumerate(module.weight_heads):
            heads = convolved[:, number * group : (number + 1) * group]
            mixed.append(torch.einsum("gh,bhij->bgij", matrix, heads))
        return torch.cat(mixed, dim=1)

    def reference_heads(self, module: Any, heads: Tensor) -> Tensor:
        """Golovneva et al. 2025, released code: RMSNorm with shared weights, times a gate."""
        normed = heads
        if self.norm:
            mean_square = heads.square().mean(-1, keepdim=True)
            normed = module.factor * module.norm * heads / (mean_square + HEAD_NORM_EPS).sqrt()
        if module.gate is None:
            return normed
        return normed / (1 + torch.exp(-module.gate(normed)))


class MultiToken(Filter):
    """Convolution and head map of the logits, the same of the weights, then norm and gate.

    Hidden numbers count as 0 in a convolution, and so do those of queries that are padding.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        heads = shape.heads
        group = part.group or heads
        size = (heads, part.queries, part.keys)
        self.width = shape.dim

        def make(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, **shape.options))

        self.logit_kernel = make(*size)
        self.weight_kernel = make(*size) if part.weights else None
        self.logit_heads = make(heads, heads) if part.head_maps else None
        has_weight_maps = part.weights and part.head_maps
        self.weight_heads = make(heads // group, group, group) if has_weight_maps else None
        self.norm = make(shape.head_dim) if part.norm else None
        self.gate: nn.Linear | None = None
        if part.gate:
            self.gate = nn.Linear(shape.head_dim, 1, **shape.options)
        self.factor = 1.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the standard layer before the norm, as in the released code."""
        with torch.no_grad():
            for kernel in (self.logit_kernel, self.weight_kernel):
                if kernel is not None:
                    kernel.zero_()
                    # The query itself is the last row, and the key itself the middle column.
                    kernel[:, -1, self.part.keys // 2] = 1
            for maps in (self.logit_heads, self.weight_heads):
                if maps is not None:
                    maps.copy_(torch.eye(maps.shape[-1]))
            if self.norm is not None:
                self.norm.fill_(1)
        if self.gate is not None:
            std = self.width**-0.5
            nn.init.trunc_normal_(self.gate.weight, std=std, a=-3 * std, b=3 * std)

    def set_depth(self, layer: int) -> None:
        """Set the factor of the norm, 1 - lambda_init of differential attention."""
        if self.part.rescale == "depth":
            self.factor = 0.2 + 0.6 * math.exp(-0.3 * layer)

    def forward(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        with without_autocast(a):
            a = self._convolve(_zero_hidden(wide(a), visible, masks), self.logit_kernel, cache, "s")
            if self.logit_heads is None:
                return a
            return torch.einsum("gh,bhij->bgij", wide(self.logit_heads), a)

    def filter_weights(
        self, a: Tensor, visible: Tensor | None, masks: Masks, cache: Cache | None
    ) -> Tensor:
        if self.weight_kernel is None:
            return a
        dtype = a.dtype
        with without_autocast(a):
            shown = _zero_hidden(wide(a), visible, masks)
            convolved = self._convolve(shown, self.weight_kernel, cache, "a")
            if visible is not None:
                convolved = convolved.masked_fill(~visible, 0)
            if self.weight_heads is None:
                return convolved.to(dtype)
            grouped = convolved.unflatten(1, self.weight_heads.shape[:2])
            mixed = torch.einsum("kgh,bkhij->bkgij", wide(self.weight_heads), grouped)
            return mixed.flatten(1, 2).to(dtype)

    def _convolve(self, a: Tensor, kernel: Tensor, cache: Cache | None, name: str) -> Tensor:
        """Return each head of a, convolved with its kernel over earlier queries and near keys."""
        earlier = self.part.queries - 1
        beside = self.part.keys // 2
        before = a.new_zeros(*a.shape[:2], earlier, a.shape[-1])
        hidden = 0
        if cache is not None:
            # Earlier queries do not see the new keys, but keys that the cache does not keep.
            key = f"multi-token {name}"
            stored = cache.total_of_keys(key, a.shape[-1] - cache.length, beside)
            if stored is not None:
                before = stored
                hidden = stored.shape[-1] - a.shape[-1]
        rows = torch.cat([before, F.pad(a, (hidden, 0))], -2)
        if cache is not None:
            cache.totals[key] = rows[..., rows.shape[-2] - earlier :, :].clone()
        padded = F.pad(rows, (beside, beside))
        convolved = F.conv2d(padded, wide(kernel).unsqueeze(1), groups=len(kernel))
        return convolved[..., hidden:]

    def finish(self, heads: Tensor) -> Tensor:
        """Return the norm of each head with shared weights, times a gate from the norm's result."""
        normed = wide(heads)
        if self.norm is not None:
            normed = self.factor * F.rms_norm(
                normed, heads.shape[-1:], wide(self.norm), eps=HEAD_NORM_EPS
            )
        if self.gate is not None:
            opened = torch.sigmoid(wide(self.gate(normed.to(self.gate.weight.dtype))))
            normed = normed * opened
        return normed.to(heads.dtype)


def _zero_hidden(a: Tensor, visible: Tensor | None, masks: Masks) -> Tensor:
    """Return a (B, H, n, m) with 0 where a key is hidden or the query is padding."""
    if visible is not None:
        a = a.masked_fill(~visible, 0)
    present = masks.present_keys()
    if present is not None:
        is_padding = ~present[..., -a.shape[-2] :].unsqueeze(-1)
        a = a.masked_fill(is_padding, 0)
    return a


def set_hidden_to_zero(a: Tensor, visible: Tensor, present: Tensor | None) -> Tensor:
    """Return a with 0 where a key is hidden, and in the rows of padding."""
    a = a.masked_fill(~visible, 0)
    if present is None:
        return a
    return a.masked_fill(~present.unsqueeze(-1), 0)


def convolve_pairs(a: Tensor, kernel: Tensor) -> Tensor:
    """Return sum over u, w of K[u, w] a[i - (C_q - 1) + u, j - (C_k - 1) / 2 + w] of each head."""
    queries, keys = kernel.shape[1:]
    n, m = a.shape[-2:]
    total = torch.zeros_like(a)
    for u in range(queries):
        for w in range(keys):
            down = queries - 1 - u
            right = (keys - 1) // 2 - w
            if down >= n or abs(right) >= m:
                # Everything would move out of the matrix.
                continue
            first, last = max(0, right), min(m, m + right)
            moved = torch.zeros_like(a)
            moved[..., down:, first:last] = a[..., : n - down, first - right : last - right]
            total = total + kernel[:, u, w].view(-1, 1, 1) * moved
    return total
