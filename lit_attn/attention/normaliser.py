"""Normalisers: the functions that turn logits into weights.

- Softmax: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1.
- Sigmoid attention: Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid
  Self-Attention", https://arxiv.org/abs/2409.04431, section 2.
- Differential attention: Ye et al. 2024, "Differential Transformer",
  https://arxiv.org/abs/2410.05258, eq. 1-3.
- Attention sink: OpenAI 2025, gpt-oss, https://arxiv.org/abs/2508.10925, section 2.3.
- Softpick: Zuhri et al. 2025, https://arxiv.org/abs/2504.20966, eq. 3.
- Logit cap: Gemma Team 2024, "Gemma 2", https://arxiv.org/abs/2408.00118, section 2.
- Offset softmax: the released language models of Nguyen et al. 2022 (MGK), rows + 1e-6;
  github.com/minhtannguyen/transformer-mgk.

Shapes: B batch, H heads, n tokens, D head width, c queries of a chunk, m keys, M keys per token.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.masks import differs_between_heads
from lit_attn.attention.parts import LayerShape, Part
from lit_attn.attention.precision import wide
from lit_attn.schema.base import Kind

# Added to the mean square in the RMSNorm of differential heads (the released code's value).
OUTPUT_NORM_EPS = 1e-5

# Added to the divisor of Softpick, after both sides were divided by e^largest (its released code).
SOFTPICK_EPS = 1e-8


class NormaliserConfig(Part, Kind):
    """Family of the functions that turn logits into weights.

    `build` returns a lit_attn.attention.normaliser.Normaliser. The inputs of `reference` are the
    logits (B, H, n, n) and `visible`, broadcastable to them, True where a query attends to a key;
    it returns the weights. Set `ignores_row_terms` to True if adding one number to all logits of a
    query leaves its weights unchanged: similarities then leave such terms out.
    """

    ignores_row_terms: ClassVar[bool] = False

    def reference_heads(self, module: Any, heads: Any) -> Any:
        """Return the heads' sums (B, H, n, D) after what follows the weighted sum of values."""
        return heads


class Normaliser(nn.Module):
    """Base of the normalisers: `forward(logits, visible)` returns weights (B, H, c, m).

    `logits` (B, H, c, m) are in float32 or wider, the lowest number of their precision where a
    query may not attend to a key. `visible`, broadcastable to them, is True where it may; None
    means everywhere.
    """

    softmaxes: ClassVar[int] = 0
    """Number of softmax sums that `combine` needs; 0 if the weights have to be formed.

    A subclass with its own `forward` has its own number, 0 unless it sets another one.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls) and "softmaxes" not in vars(cls):
            cls.softmaxes = 0

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__()
        self.part = part

    def over_keys(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Return weights of logits (B, H, c, M, m); a token's logit is their log-sum-exp over M."""
        logits = wide(logits)
        logits = logits.squeeze(3) if logits.shape[3] == 1 else logits.logsumexp(3)
        return self(logits, visible)

    def combine(self, attend: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Return the weighted sums (B, H, n, D) of v (B, H, m, D), without forming the weights.

        `attend` returns the sums of a softmax over the keys and the sink for any values like v. It
        is called `softmaxes` times.
        """
        return attend(v)

    def sink(self) -> Tensor | float | None:
        """Return the logit, one or (H), of a key without value that every query sees, or None."""
        return None

    def finish(self, heads: Tensor) -> Tensor:
        """Return the heads' weighted sums (B, H, n, D) after what follows them; unchanged here."""
        return heads

    def set_depth(self, layer: int) -> None:
        """Use the number of the layer, which counts from 0; ignored here."""


class SoftmaxConfig(NormaliserConfig, kind="softmax"):
    """a_ij = exp(s_ij) / sum_j exp(s_ij) (Vaswani et al. 2017, eq. 1)."""

    ignores_row_terms = True

    def build(self, shape: LayerShape) -> Any:
        return Softmax(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Vaswani et al. 2017, eq. 1."""
        return torch.softmax(logits, dim=-1)


class Softmax(Normaliser):
    """a_ij = exp(s_ij) / sum_j exp(s_ij)."""

    softmaxes = 1

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        return logits.softmax(-1)

    def over_keys(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        """Return the sum of the softmax over all M m keys: it needs no log-sum-exp over M."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if logits.shape[3] == 1:
            return logits.squeeze(3).softmax(-1, dtype=dtype)
        return logits.flatten(3).softmax(-1, dtype=dtype).view_as(logits).sum(3)


class SigmoidConfig(NormaliserConfig, kind="sigmoid"):
    """a_ij = 1 / (1 + exp(-(s_ij + b))), b = -log n (Ramapuram et al. 2024, section 2).

    n is the number of keys that the query may attend to: without causal and padding masks it is the
    number of tokens, as in the paper.
    """

    def build(self, shape: LayerShape) -> Any:
        return Sigmoid(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Ramapuram et al. 2024, section 2: sigmoid(s_ij + b), b = -log n."""
        n = visible.expand(*visible.shape[:-1], logits.shape[-1]).sum(-1, keepdim=True).clamp_min(1)
        return 1 / (1 + torch.exp(-(logits - n.double().log()).clamp_min(-700)))


class Sigmoid(Normaliser):
    """a_ij = sigmoid(s_ij - log n); n is the number of keys that i may attend to."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        if visible is None:
            return torch.sigmoid(logits - math.log(logits.shape[-1]))
        shown = visible.expand(*visible.shape[:-1], logits.shape[-1])
        count = shown.sum(-1, keepdim=True).clamp_min(1).to(logits.dtype)
        return torch.sigmoid(logits - count.log())


class OffsetSoftmaxConfig(NormaliserConfig, kind="offset-softmax"):
    """a_ij = exp(s_ij) / (offset + sum_j exp(s_ij)), as in MGK's released language models."""

    offset: PositiveFloat = Field(1e-6, description="term added to the sum over keys")

    def build(self, shape: LayerShape) -> Any:
        return OffsetSoftmax(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """transformer-mgk, language modelling: exp(s_ij) / (sum_j exp(s_ij) + 1e-6)."""
        largest = find_largest(logits)
        exponentials = torch.exp(logits - largest)
        offset = module.part.offset * torch.exp(-largest)
        return exponentials / (exponentials.sum(-1, keepdim=True) + offset)


class OffsetSoftmax(Normaliser):
    """a_ij = exp(s_ij) / (offset + sum_j exp(s_ij))."""

    softmaxes = 1

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        share = torch.sigmoid(logits.logsumexp(-1, keepdim=True) - self.sink())
        return logits.softmax(-1) * share

    def sink(self) -> float:
        return math.log(self.part.offset)


class SinkConfig(NormaliserConfig, kind="sink"):
    """a_ij = exp(s_ij) / (exp(b_m) + sum_j exp(s_ij)), with a learned b_m of each head.

    The learned attention sink of gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925, section
    2.3): a key without a value, which no mask hides.
    """

    start: float = Field(0.0, description="initial b_m")

    def build(self, shape: LayerShape) -> Any:
        return Sink(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """gpt-oss: exp(s_ij) / (exp(b_m) + sum_j exp(s_ij))."""
        largest = find_largest(logits)
        exponentials = torch.exp(logits - largest)
        sink = torch.exp(module.logit.view(-1, 1, 1) - largest)
        return exponentials / (sink + exponentials.sum(-1, keepdim=True))


class Sink(Normaliser):
    """a_ij = exp(s_ij) / (exp(b_m) + sum_j exp(s_ij))."""

    softmaxes = 1

    def __init__(self, part: Any, shape: LayerShape) -> None:
        super().__init__(part, shape)
        self.logit = nn.Parameter(torch.empty(shape.heads, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit, self.part.start)

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        sink = wide(self.logit).view(-1, 1, 1)
        share = torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sink)
        return logits.softmax(-1) * share

    def sink(self) -> Tensor:
        return wide(self.logit)


class SoftpickConfig(NormaliserConfig, kind="softpick"):
    """a_ij = max(e^s_ij - 1, 0) / (sum_j |e^s_ij - 1| + 1e-8 e^mu_i), mu_i = max(0, max_j s_ij).

    Zuhri et al. 2025, "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax",
    https://arxiv.org/abs/2504.20966, eq. 3.
    """

    def build(self, shape: LayerShape) -> Any:
        return Softpick(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Zuhri et al. 2025, eq. 3, with the scaled epsilon of its released code."""
        largest = find_largest(logits).clamp_min(0)
        difference = torch.exp(logits - largest) - torch.exp(-largest)
        difference = difference.masked_fill(~visible, 0)
        total = difference.abs().sum(-1, keepdim=True) + SOFTPICK_EPS
        return difference.clamp_min(0) / total


class Softpick(Normaliser):
    """a_ij = max(e^s_ij - 1, 0) / (sum_j |e^s_ij - 1| + 1e-8 e^mu_i), mu_i = max(0, max_j s_ij)."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        # Both sides are divided by e^largest. Without a positive logit every weight is 0.
        largest = logits.detach().amax(-1, keepdim=True).clamp_min(0)
        rectified = torch.exp(logits - largest) - torch.exp(-largest)
        if visible is not None:
            rectified = rectified.masked_fill(~visible, 0)
        total = rectified.abs().sum(-1, keepdim=True) + SOFTPICK_EPS
        return rectified.relu() / total


class CappedSoftmaxConfig(NormaliserConfig, kind="capped-softmax"):
    """Softmax of c tanh(s_ij / c), so that no logit exceeds c (Gemma 2).

    Gemma Team 2024, "Gemma 2", https://arxiv.org/abs/2408.00118, section 2. Biases are added before
    the cap and masks act after it.
    """

    cap: PositiveFloat = Field(50.0, description="c, the largest logit")

    def build(self, shape: LayerShape) -> Any:
        return CappedSoftmax(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Gemma 2, section 2: softmax of c tanh(s / c) over the visible keys."""
        capped = module.part.cap * torch.tanh(logits / module.part.cap)
        return torch.softmax(capped.masked_fill(~visible, -1e300), dim=-1)


class CappedSoftmax(Normaliser):
    """Softmax of c tanh(s_ij / c)."""

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        cap = self.part.cap
        capped = cap * torch.tanh(logits / cap)
        if visible is not None:
            capped = capped.masked_fill(~visible, torch.finfo(capped.dtype).min)
        return capped.softmax(-1)


class DifferentialConfig(NormaliserConfig, kind="differential"):
    """softmax(s_1) - lambda softmax(s_2) of each pair of heads (Ye et al. 2024, eq. 1-3).

    Heads 2m and 2m + 1 have the queries and keys 1 and 2 of the paper's head m; their values, side
    by side, are its values of width 2 D. Each head m is then normalised (RMSNorm without weights)
    and multiplied by 1 - lambda_init. `lambda_init: depth` is 0.8 - 0.6 exp(-0.3 l) in layer l,
    which counts from 0, as in the released code; the paper also tries 0.8 in all layers.
    """

    ignores_row_terms = True
    lambda_init: Annotated[float, Field(gt=0, lt=1)] | Literal["depth"] = Field(
        0.8, description="initial lambda of all layers, or depth: it grows with the layer"
    )
    weight: bool = Field(
        False, description="learned weights of the norm, shared by the heads, as in released code"
    )

    def stacked_vectors(self) -> tuple[str, ...]:
        return ("vectors",)

    def check_heads(self, heads: int) -> None:
        if heads % 2:
            raise ValueError(
                f"normaliser: differential attention needs an even number of heads, not {heads}"
            )

    def build(self, shape: LayerShape) -> Any:
        return Differential(self, shape)

    def reference(self, module: Any, logits: Tensor, visible: Tensor) -> Tensor:
        """Ye et al. 2024, eq. 1 and 2: the weights of a pair of heads, for both of them."""
        q1, q2, k1, k2 = module.vectors
        factor = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + module.lambda_init
        # A head that sees no key has no weights.
        a = torch.softmax(logits, dim=-1).masked_fill(~visible, 0)
        weights = []
        for m in range(0, logits.shape[1], 2):
            weights += [a[:, m] - factor * a[:, m + 1]] * 2
        return torch.stack(weights, dim=1)

    def reference_heads(self, module: Any, h: Tensor) -> Tensor:
        """Ye et al. 2024, eq. 3: (1 - lambda_init) LN(head), LN: RMSNorm of a pair's 2 D values."""
        heads = []
        for m in range(0, h.shape[1], 2):
            head = torch.cat([h[:, m], h[:, m + 1]], dim=-1)
            head = head / (head.square().mean(-1, keepdim=True) + OUTPUT_NORM_EPS).sqrt()
            if module.weight is not None:
                head = head * module.weight
            heads += list(((1 - module.lambda_init) * head).chunk(2, dim=-1))
        return torch.stack(heads, dim=1)


class Differential(Normaliser):
    """softmax(s_2m) - lambda softmax(s_2m+1) for both heads 2m and 2m + 1.

    lambda = exp(q1.k1) - exp(q2.k2) + lambda_init with learned vectors q1, k1, q2, k2 of the
    head's width, one set for the layer (eq. 2). A pair of heads is normalised as one head (eq. 3).
    """

    softmaxes = 2
    part: DifferentialConfig

    def __init__(self, part: DifferentialConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        # Rows: q1, q2, k1, k2.
        self.vectors = nn.Parameter(torch.empty(4, shape.head_dim, **shape.options))
        self.weight = None
        if part.weight:
            self.weight = nn.Parameter(torch.empty(2 * shape.head_dim, **shape.options))
        self.lambda_init = 0.0
        self.set_depth(0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors from N(0, 0.1^2), as in the released code; set the weights to 1."""
        nn.init.normal_(self.vectors, std=0.1)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def set_depth(self, layer: int) -> None:
        """Set lambda_init of this layer (section 2.1 of the paper)."""
        if self.part.lambda_init == "depth":
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        else:
            self.lambda_init = self.part.lambda_init

    def forward(self, logits: Tensor, visible: Tensor | None) -> Tensor:
        weights = logits.softmax(-1)
        if visible is not None and differs_between_heads(visible):
            # The softmax of a head that sees no key is uniform; its pair must not take it over.
            weights = weights.masked_fill(~visible, 0)
        # `unbind` would make two saved tensors of one memory, which compiled code of PyTorch 2.15
        # can overwrite before it has computed the gradient of `factor` (LOG.md).
        pairs = weights.unflatten(1, (-1, 2))
        first, second = pairs.select(2, 0), pairs.select(2, 1)
        return (first - self._factor() * second).repeat_interleave(2, 1)

    def combine(self, attend: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        """Return the sums from two calls: both heads of a pair for the values of either head."""
        of_heads = []
        for head in range(2):
            values = v.unflatten(1, (-1, 2)).select(2, head).repeat_interleave(2, 1)
            sums = attend(values)
            pairs = wide(sums).unflatten(1, (-1, 2))
            first, second = pairs.select(2, 0), pairs.select(2, 1)
            of_heads.append((first - self._factor() * second).to(sums.dtype))
        return torch.stack(of_heads, 2).flatten(1, 2)

    def _factor(self) -> Tensor:
        """Return lambda in float32 or wider."""
        q, k = wide(self.vectors).chunk(2)
        lambda_1, lambda_2 = (q * k).sum(-1).exp()
        return lambda_1 - lambda_2 + self.lambda_init

    def finish(self, heads: Tensor) -> Tensor:
        """Return (1 - lambda_init) RMSNorm of each pair of heads, side by side."""
        pairs = wide(heads).unflatten(1, (-1, 2)).transpose(2, 3)
        weight = None if self.weight is None else wide(self.weight)
        normed = F.rms_norm(pairs.flatten(-2), (2 * heads.shape[-1],), weight, eps=OUTPUT_NORM_EPS)
        normed = (1 - self.lambda_init) * normed.unflatten(-1, (2, -1)).transpose(2, 3)
        return normed.flatten(1, 2).to(heads.dtype)


def find_largest(logits: Tensor) -> Tensor:
    """Return a number for each query by whose exponential both sides of a ratio can be divided."""
    # Without a visible key all logits are -1e300, and the exponential of 1e300 has no gradient.
    return logits.detach().amax(-1, keepdim=True).clamp_min(-700)
