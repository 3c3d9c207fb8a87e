"""Numbers that are added to the logits of pairs of tokens.

- ALiBi: Press et al. 2022, https://arxiv.org/abs/2108.12409, section 3.
- T5: Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1, and its released code.
- Forgetting Transformer: Lin et al. 2025, https://arxiv.org/abs/2503.02130, eq. 5-7.

Shapes: B batch, n queries, m keys (n, and those in the cache), d width, H heads.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.cache import Cache, KeyValues
from lit_attn.attention.masks import Masks, TokenTerms
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind

LOG_GATES = "log gates"  # Name in a cache of the sums of the logarithms of forgetting gates.


class BiasConfig(Part, Kind):
    """Family of the numbers that are added to the logits of pairs of tokens.

    They are added after a composition of the logits and before the masks hide keys. `build` returns
    a lit_attn.attention.bias.Bias. The inputs of `reference` are x (B, n, d), whether attention is
    causal, and which tokens are not padding, (B, H, n) or smaller, or None. It returns
    (B or 1, H, n, n).
    """

    def with_order(self, is_causal: bool) -> "BiasConfig":
        """Return the bias for layers whose order is known, causal or not.

        A bias that follows the order of a call needs this where a mask alone has the order.
        """
        return self


class Bias(nn.Module):
    """Base of the biases: `forward(x, masks, cache)` returns the bias, or None.

    x (B, n, d) are the tokens of this call; the last query is the last key. The bias is
    broadcastable to (B, H, n, m), in float32 or wider; None adds nothing.
    """

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def add_to(self, masks: Masks, x: Tensor, cache: Cache | None) -> Masks:
        """Return the masks with this bias.

        A bias that is a sum of a term of the query and a term of the key overrides this method, so
        that no bias of all pairs is formed.
        """
        return masks.with_bias(self(x, masks, cache))


class NoBiasConfig(BiasConfig, kind="none"):
    """No bias."""

    def build(self, shape: LayerShape) -> Any:
        return NoBias(self, shape)

    def reference(self, module: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        return x.new_zeros(1, 1, x.shape[1], x.shape[1])


class NoBias(Bias):
    """No bias."""

    def forward(self, x: Tensor, masks: Masks, cache: Cache | None) -> None:
        return None


def distances(n: int, offset: int, device: torch.device) -> Tensor:
    """Return i - j of the queries i and the keys j, (n, offset + n); the first key is j = 0."""
    i = torch.arange(offset, offset + n, device=device).unsqueeze(1)
    j = torch.arange(offset + n, device=device)
    return i - j


def sees_earlier_keys_only(x: Tensor, masks: Masks) -> bool:
    """Return True if the keys of every query of x (B, n, d) stand at or before the query.

    False for a single query, whose bias has no more elements than its keys have terms, and on the
    meta device, where FLOPs are counted, which are those of a bias of pairs.
    """
    return masks.is_causal and x.shape[1] > 1 and not x.is_meta


def fill(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return N numbers as a tensor (N,) with the type and the device of `like`.

    The device writes them: a copy of numbers makes it wait, and a CUDA graph cannot contain one.
    """
    return torch.stack([like.new_full((), number) for number in numbers])


def list_slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each head."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * k / power) for k in range(1, power + 1)]
    # Further heads have every second slope of twice as many heads.
    slopes += [2 ** (-8 * (2 * k - 1) / (2 * power)) for k in range(1, heads - power + 1)]
    return slopes


def list_bucket_starts(exact: int, count: int, max_distance: int) -> list[int]:
    """Return the smallest distance of each bucket from number `exact` to the last, `count - 1`.

    The buckets are evenly spaced in the logarithm of the distance. Python computes it: the
    logarithm of a GPU differs in the last bit, which would move a distance to another bucket.
    """
    starts: list[int] = []
    ratio = math.log(max_distance / exact)
    for bucket in range(exact, count):
        distance = starts[-1] if starts else exact
        while math.log(distance / exact) / ratio * (count - exact) < bucket - exact:
            distance += 1
        starts.append(distance)
    return starts


class AlibiConfig(BiasConfig, kind="alibi"):
    """-slope_m |i - j|, with a fixed slope of each head (ALiBi).

    Press et al. 2022, "Train Short, Test Long", https://arxiv.org/abs/2108.12409, section 3: the
    slopes are 2^(-8 k / H), k = 1 to H, if H is a power of two. Otherwise they are those of the
    next lower power P, and then every second one of 2 P heads.
    """

    needs_self = "relates positions of one sequence"
    needs_order = "adds a distance of two tokens"

    def build(self, shape: LayerShape) -> Any:
        return Alibi(self, shape)

    def reference(self, module: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        """Press et al. 2022, section 3, pair by pair."""
        n = x.shape[1]
        heads = len(module.slopes)
        bias = x.new_zeros(1, heads, n, n)
        for m in range(heads):
            for i in range(n):
                for j in range(n):
                    bias[0, m, i, j] = -find_slope(m, heads) * abs(i - j)
        return bias


class Alibi(Bias):
    """-slope_m |i - j|."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        # Python numbers: a buffer outside the state dict would have no values in a layer that is
        # built on the meta device and then loads its weights.
        self.slopes = list_slopes(shape.heads)

    def forward(self, x: Tensor, masks: Masks, cache: Cache | None) -> Tensor:
        distance = distances(x.shape[1], masks.offset, x.device).abs().to(wide(x).dtype)
        slopes = fill(self.slopes, distance)
        return -slopes.view(-1, 1, 1) * distance

    def add_to(self, masks: Masks, x: Tensor, cache: Cache | None) -> Masks:
        if not sees_earlier_keys_only(x, masks):
            return super().add_to(masks, x, cache)
        # Without |.|, the distance is a difference of positions: -slope i + slope j.
        keys = torch.arange(masks.offset + x.shape[1], device=x.device).to(wide(x).dtype)
        slopes = fill(self.slopes, keys).view(1, -1, 1)
        queries = keys[masks.offset :]
        return masks._replace(terms=TokenTerms(-slopes * queries, slopes * keys))


class T5BiasConfig(BiasConfig, kind="t5"):
    """A learned number for each head and each bucket of distances.

    Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1, and its released code. The
    buckets are exact for short distances and logarithmic up to `max_distance`. Every layer has its
    own table here; in T5 all layers share the first one.
    """

    needs_self = "relates positions of one sequence"
    needs_order = "adds a number for the distance of two tokens"
    buckets: int = Field(32, ge=4, multiple_of=4, description="number of buckets of distances")
    max_distance: PositiveInt = Field(128, description="distance from which one bucket holds all")
    direction: Literal["by-order", "both", "before"] = Field(
        "by-order",
        description="keys that have buckets; both: half of the buckets are for keys after the "
        "query, as in an encoder; before: all are for keys before it, as in a decoder; by-order: "
        "before where attention is causal, otherwise both",
    )

    def with_order(self, is_causal: bool) -> BiasConfig:
        return self.model_copy(update={"direction": self.choose_direction(is_causal)})

    def choose_direction(self, is_causal: bool) -> str:
        """Return "both" or "before" for a call in causal order, or in none."""
        if self.direction != "by-order":
            return self.direction
        return "before" if is_causal else "both"

    def identity(self) -> dict[str, Any]:
        """Return the identity without `both`: the default before `by-order`.

        Without causal order both compute the same. In causal order the experiment names the order.
        """
        identity = dict(super().identity())
        if self.direction == "both":
            del identity["direction"]
        return identity

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("table",)

    def build(self, shape: LayerShape) -> Any:
        return T5Bias(self, shape)

    def reference(self, module: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        """Raffel et al. 2020: the bucket of each pair of positions, one by one."""
        n = x.shape[1]
        has_keys_before_only = module.part.choose_direction(is_causal) == "before"
        rows = []
        for i in range(n):
            numbers = [
                find_bucket(
                    j - i, has_keys_before_only, module.part.buckets, module.part.max_distance
                )
                for j in range(n)
            ]
            rows.append(module.table[numbers])
        return torch.stack(rows).permute(2, 0, 1).unsqueeze(0)


class T5Bias(Bias):
    """A learned number for each head and each bucket of distances."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.width = shape.dim
        self.table = nn.Parameter(torch.empty(part.buckets, shape.heads, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table from N(0, 1 / d), as in the released code."""
        nn.init.normal_(self.table, std=self.width**-0.5)

    def forward(self, x: Tensor, masks: Masks, cache: Cache | None) -> Tensor:
        distance = distances(x.shape[1], masks.offset, x.device)
        # A cache has keys before the query only, also where a mask has the order.
        direction = self.part.choose_direction(masks.is_causal or cache is not None)
        buckets = self._find_buckets(distance, direction)
        return wide(self.table)[buckets].permute(2, 0, 1)

    def _find_buckets(self, distance: Tensor, direction: str) -> Tensor:
        """Return the bucket of each distance i - j, for the keys of `direction`."""
        count = self.part.buckets
        first = torch.zeros_like(distance)
        if direction == "before":
            distance = distance.clamp_min(0)
        else:
            count //= 2
            # Keys after the query have the second half of the buckets.
            first = torch.where(distance < 0, count, 0)
            distance = distance.abs()
        exact = count // 2
        starts = list_bucket_starts(exact, count, self.part.max_distance)
        borders = fill(starts, distance)
        later = torch.bucketize(distance, borders, right=True)
        return first + torch.where(distance < exact, distance, exact - 1 + later)


class ForgettingConfig(BiasConfig, kind="forgetting"):
    """sum over t = j + 1 to i of log f_t, with the gate f_t = sigmoid(x_t w_m + b_m) of each head.

    Lin et al. 2025, "Forgetting Transformer", https://arxiv.org/abs/2503.02130, eq. 5-7. Without
    causal order the bias is the sum between both tokens. Tokens that are padding have f = 1.
    """

    needs_self = "relates positions of one sequence"
    needs_order = "adds the gates between two tokens"
    start: float = Field(0.0, description="initial b_m: 0 gives gates near 1/2, 5 near 1")

    def build(self, shape: LayerShape) -> Any:
        return Forgetting(self, shape)

    def reference(self, module: Any, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        """Lin et al. 2025, eq. 5-7: the sum of log f_t between two tokens, pair by pair."""
        # log sigmoid, which is finite for any gate
        log_gates = -F.softplus(-module.gate(x))
        if present is not None:
            log_gates = log_gates * present.transpose(1, 2)
        n = x.shape[1]
        rows = []
        for i in range(n):
            row = [log_gates[:, min(i, j) + 1 : max(i, j) + 1].sum(1) for j in range(n)]
            rows.append(torch.stack(row, dim=-1))
        return torch.stack(rows, dim=2)


class Forgetting(Bias):
    """-|c_i - c_j|, with c_t the sum of log sigmoid(x_u w_m + b_m) over u = 0 to t."""

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.gate = nn.Linear(shape.dim, shape.heads, **shape.options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw w_m from N(0, 0.02^2), as in the released code."""
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.constant_(self.gate.bias, self.part.start)

    def forward(self, x: Tensor, masks: Masks, cache: Cache | None) -> Tensor:
        sums, all_sums = self._sum_log_gates(x, masks, cache)
        return -(sums.unsqueeze(-1) - all_sums.unsqueeze(-2)).abs()

    def add_to(self, masks: Masks, x: Tensor, cache: Cache | None) -> Masks:
        if not sees_earlier_keys_only(x, masks):
            return super().add_to(masks, x, cache)
        # The sums decrease, so -|c_i - c_j| is c_i - c_j for every key before the query.
        sums, all_sums = self._sum_log_gates(x, masks, cache)
        return masks._replace(terms=TokenTerms(sums, -all_sums))

    def _sum_log_gates(self, x: Tensor, masks: Masks, cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Return c of the tokens x (B, H, n), and of these and the cached ones (B, H, m)."""
        log_gates = F.logsigmoid(wide(self.gate(x))).transpose(1, 2)
        present = masks.present_keys()
        if present is not None:
            log_gates = log_gates.masked_fill(~present[..., -x.shape[1] :], 0)
        sums = log_gates.cumsum(-1)
        all_sums = sums
        if cache is not None:
            assert isinstance(cache, KeyValues)
            if LOG_GATES in cache.totals:
                sums = sums + cache.totals[LOG_GATES]
            cache.totals[LOG_GATES] = sums[..., -1:].clone()
            all_sums = cache.extend(LOG_GATES, sums, axis=-1)
        return sums, all_sums


def find_slope(m: int, heads: int) -> float:
    """Return the slope of head `m`, counted from 0."""
    lower = 1
    while 2 * lower <= heads:
        lower *= 2
    if m < lower:
        return 1 / 2 ** (8 * (m + 1) / lower)
    return 1 / 2 ** (8 * (2 * (m - lower) + 1) / (2 * lower))


def find_bucket(relative: int, has_keys_before_only: bool, buckets: int, max_distance: int) -> int:
    """Return the bucket of a key that is `relative` positions after its query."""
    first = 0
    if has_keys_before_only:
        length = max(-relative, 0)
    else:
        buckets //= 2
        first = buckets if relative > 0 else 0
        length = abs(relative)
    exact = buckets // 2
    if length < exact:
        return first + length
    steps = math.log(length / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + math.floor(steps), buckets - 1)
