"""Similarities: the logits of dot products, Gaussians and mixtures of keys, and linear attention.

- Dot product: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 1.
- Mixture of Gaussian Keys (MGK): Nguyen et al. 2022, "Improving Transformers with Probabilistic
  Attention Keys", https://arxiv.org/abs/2110.08678, section 2, eq. 7, Tables 5 and 6.
- Linear attention: Katharopoulos et al. 2020, "Transformers are RNNs",
  https://arxiv.org/abs/2006.16236; with several keys MGK, section 2.4. O(n) time and memory.

Shapes: B batch, n tokens, d width, H heads, H' key heads, D head width, M keys for every token, E
width of the features.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import dispatch
from lit_attn.attention.cache import Cache, KeyValues, RunningSums
from lit_attn.attention.dispatch import Inputs
from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.mixture_parts import LinearConfig, MixedKeysConfig, MixtureConfig
from lit_attn.attention.parts import LayerShape, SimilarityConfig
from lit_attn.attention.precision import (
    as_multiplied,
    rounded_terms,
    square,
    wide,
    without_autocast,
)
from lit_attn.attention.statistics import Learner, Reduce

# Added to divisors as in MGK's code: of linear attention, where a query may see no key, and of the
# responsibilities of Soft-E.
LINEAR_OFFSET, RESPONSIBILITY_OFFSET = 1e-5, 1e-6

# Tokens of a chunk of causal sums. A chunk costs products of its pairs of tokens and one D x D sum,
# which are about as many numbers at usual head widths D.
SUMS_CHUNK = 64


class Similarity(Learner):
    """Base of the similarities: features of q and of the keys whose scaled products are the logits,

        s_ijr = q'_i . k'_jr / sqrt(D).

    A softmax over all M n products is then a soft mixture over each token's keys. A term that is
    equal for all keys of a query can be left out unless `needs_row_terms`. A similarity without
    logits overrides `attend`, `new_cache` and `weights` instead of `features`.
    """

    # A member overrides at least one of these methods.
    required_methods = ("features", "keys", "attend")
    # True if the largest of the M logits of a pair of tokens counts, not their log-sum-exp.
    hard = False

    def __init__(self, part: SimilarityConfig, shape: LayerShape) -> None:
        super().__init__()
        self.part = part
        self.needs_row_terms = shape.needs_row_terms

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        """Return all keys (B, n, M, H', D) from x or the memory (B, n, d), and k (B, n, H', D)."""
        return k.unsqueeze(2)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return q' (B, H, n, E) and k' (B, H, M, n', E) of q (B, H, n, D), keys (B, H, M, n', D).

        `first` is the position of the first key. With a cache there are more keys than queries.
        """
        return q, keys

    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Add the statistics of a forward pass of training, if the similarity `has_statistics`.

        q and k are the features, and `scale` the factor of their products. `end_step` uses the
        statistics.
        """

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums of values (B, H, n, D), and extend the cache by the tokens."""
        return dispatch.attend(self, inputs)

    def weights(self, inputs: Inputs) -> Tensor | None:
        """Return the weights (B, H, n, n), or None if the similarity never forms them."""
        return dispatch.weights(self, inputs)

    def new_cache(self, window: int | None) -> Cache:
        """Return an empty cache for decoding one batch of sequences."""
        return KeyValues(window)

    def log_prior(self, n: int, first: int = 0) -> Tensor | float:
        """Return log pi_r of n keys from position `first` on, broadcastable to (H, M, n)."""
        return 0.0

    def mean_prior(self) -> Tensor | None:
        """Return the weights of a token's keys (H, M), or (1, M); None without such weights."""
        return None

    def variances(self, keys: Tensor) -> Tensor:
        """Return sigma_r^2 of each key in units of sqrt(D), (M,), for keys (B, H', M, n, D)."""
        return wide(keys).new_ones(keys.shape[2])

    def extra_key_weights(self) -> Tensor | None:
        """Return the projections of the second and further keys, (M - 1) H' D x d, or None."""
        return None


class DotProduct(Similarity):
    """s_ij = q_i.k_j / sqrt(D)."""

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        return q, keys


class MixedKeys(Similarity):
    """M keys for every token: projected or shifted, with weights pi_r."""

    part: MixedKeysConfig

    def __init__(self, part: MixedKeysConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        m, heads, width, factory = part.keys, shape.key_heads, shape.head_dim, shape.options
        if part.source == "projected" and m > 1:
            added = (m - 1) * heads * width
            self.more = nn.Linear(shape.dim, added, bias=shape.qkv_bias, **factory)
        if part.source == "shifted":
            self.shift = nn.Parameter(torch.empty(m, heads, width, **factory))
        scopes = {"head": (shape.heads, 1), "layer": (1, 1)}
        size = (m, *scopes.get(part.prior_scope, (shape.heads, part.positions)))
        # A hard assignment takes the largest logit, which needs no weights of the keys.
        weighted = m > 1 and not self.hard
        if weighted and part.prior in ("learned", "clamped"):
            self.prior = nn.Parameter(torch.empty(size, **factory))
        elif weighted and part.prior == "m-step":
            self.register_buffer("prior", torch.empty(size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the offsets as `shift_init` says, and set every pi to 1 / M."""
        with torch.no_grad():
            if self.part.source == "shifted":
                nn.init.normal_(self.shift)
                if self.part.shift_init == "released":
                    self.shift.mul_(0.5)[0].zero_()
            if hasattr(self, "prior"):
                self.prior.fill_(0.0 if self.part.prior == "learned" else 1 / self.part.keys)

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        if self.part.source == "shifted":
            return k.unsqueeze(2) + self.shift
        if self.part.keys == 1:
            return k.unsqueeze(2)
        more = self.more(x).unflatten(-1, (self.part.keys - 1, *k.shape[-2:]))
        return torch.cat([k.unsqueeze(2), more], 2)

    def log_prior(self, n: int, first: int = 0) -> Tensor | float:
        """Return log pi_r; raise ValueError beyond the positions that have a pi."""
        if not hasattr(self, "prior"):
            return -math.log(self.part.keys)
        prior: Tensor = self.prior
        if self.part.prior_scope == "position":
            if first + n > self.part.positions:
                text = f"the mixture's weights are for {self.part.positions} positions"
                raise ValueError(f"{first + n} tokens, but {text}")
            prior = prior[..., first : first + n]
        prior = wide(prior).transpose(0, 1)
        if self.part.prior == "learned":
            return prior.log_softmax(1)
        return prior.clamp(torch.finfo(prior.dtype).tiny, 1).log()

    def mean_prior(self) -> Tensor | None:
        """Return pi of every head and key, averaged over positions: (H, M) or (1, M)."""
        if not hasattr(self, "prior"):
            return None
        log_prior = self.log_prior(self.prior.shape[-1])
        assert isinstance(log_prior, Tensor)
        return log_prior.exp().mean(-1)

    def extra_key_weights(self) -> Tensor | None:
        return self.more.weight if hasattr(self, "more") else None


class Mixture(MixedKeys):
    """s_ijr of a Gaussian or dot kernel, with log pi_r where the assignment is soft."""

    part: MixtureConfig

    def __init__(self, part: MixtureConfig, shape: LayerShape) -> None:
        self.hard = part.assignment == "hard"
        super().__init__(part, shape)
        self.width, self.unit = shape.head_dim, math.sqrt(shape.head_dim)
        # Python numbers: a buffer outside the state dict would have no values in a layer that is
        # built on the meta device and then loads its weights.
        self.fixed_variances: tuple[float, ...] = (1.0,) * part.keys
        if isinstance(part.variance, tuple):
            self.fixed_variances = part.variance
        learns = part.variance == "learned"
        if learns:
            self.log_variance = nn.Parameter(torch.zeros(part.keys, **shape.options))
        # Sums of the training step's responsibilities and, in the last row, of its pairs of tokens:
        # (H, M + 1, positions), with 1 where heads or positions share a pi.
        self.sums: Tensor | None = None
        # |q_i|^2 cancels in the softmax unless keys of one token weigh it differently.
        has_terms = self.needs_row_terms or len(set(self.fixed_variances)) > 1 or learns
        self.query_matters = part.kernel == "gaussian" and has_terms

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "log_variance"):
            nn.init.zeros_(self.log_variance)

    def variances(self, keys: Tensor) -> Tensor:
        if hasattr(self, "log_variance"):
            return wide(self.log_variance).exp()
        values = [wide(keys).new_full((1,), number) for number in self.fixed_variances]
        return torch.cat(values)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        q, keys = as_multiplied(q), as_multiplied(keys)
        ones = torch.ones_like(q[..., :1])
        variances = self.variances(keys)
        variance = variances.view(-1, 1, 1).to(keys.dtype)
        offset = torch.zeros_like(wide(keys[..., 0]))
        if not self.hard:
            offset = offset + self.unit * self.log_prior(keys.shape[-2], first)
        if self.part.kernel == "gaussian":
            offset = offset - square(keys).squeeze(-1) / (2 * variances.view(-1, 1))
            keys = keys / variance
        offsets = rounded_terms(offset.unsqueeze(-1), keys)
        q_parts, k_parts = [q, *(ones for _ in offsets)], [keys, *offsets]
        if self.query_matters:
            squares = rounded_terms(-square(q) / 2, q)
            q_parts += squares
            k_parts += [(1 / variance).expand_as(keys[..., :1]) for _ in squares]
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1)

    @property
    def has_statistics(self) -> bool:
        return self.part.prior == "m-step" and hasattr(self, "prior")

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Add the responsibilities of a forward pass to those of the training step.

        The sums are over the batch, over the pairs of tokens that attend, and over everything that
        shares a pi. Queries that are padding do not count.
        """
        n, keys = q.shape[-2], k.shape[-2]
        assigned = pairs = torch.zeros((), device=q.device)
        for rows in in_chunks(n, CHUNK):
            logits = wide(torch.einsum("bhce,bhrme->bhcrm", q[:, :, rows] * scale, k))
            if self.part.kernel == "gaussian" and not self.query_matters:
                # With the offset, |q_i|^2 does not cancel in the responsibilities.
                half_square = square(q[:, :, rows, : self.width]).unsqueeze(-1) / 2
                logits -= scale * half_square / self.fixed_variances[0]
            total = logits.logsumexp(3, keepdim=True) - math.log(RESPONSIBILITY_OFFSET)
            responsibility = logits.softmax(3).mul_(torch.sigmoid(total))
            visible = masks.chunk(rows, slice(0, keys), keys, q.device)
            weight = torch.ones_like(responsibility[:, :, :, :1])
            if visible is not None:
                weight = weight * visible.unsqueeze(-2)
            if (present := masks.present_queries(rows)) is not None:
                weight = weight * present.unsqueeze(-2)
            assigned = assigned + responsibility.mul_(weight).sum((0, 2))
            pairs = pairs + weight.sum((0, 2))
            del logits, responsibility, weight  # The next chunk needs the memory.
        shared = {"head": (-1,), "layer": (0, -1), "position": ()}[self.part.prior_scope]
        if shared:
            assigned, pairs = (sums.sum(shared, keepdim=True) for sums in (assigned, pairs))
        if self.sums is None:
            count, heads, positions = self.prior.shape
            self.sums = assigned.new_zeros(heads, count + 1, positions)
        self.sums[..., : assigned.shape[-1]] += torch.cat([assigned, pairs], dim=1)

    @torch.no_grad()
    def end_step(self, reduce: Reduce | None = None) -> None:
        """Set pi_r to the mean responsibility of key r: the M-step (MGK eq. 8 and below).

        The mean is over all pairs of tokens of the training step, on all processes with `reduce`.
        The logits of the step used the previous pi. A pi without any pair keeps its value. As in
        MGK's code, 1e-6 is added to divisors, and the last pi_r is 1 minus the others.
        """
        if self.sums is None:
            return
        if reduce is not None:
            reduce(self.sums)
        assigned, pairs = self.sums[:, :-1], self.sums[:, -1:]
        mean = (assigned / (pairs + RESPONSIBILITY_OFFSET)).transpose(0, 1)
        mean[-1] = 1 - mean[:-1].sum(0)
        has_pairs = pairs.transpose(0, 1) > 0
        self.prior.copy_(torch.where(has_pairs, mean, wide(self.prior)))
        self.sums = None


class Linear(MixedKeys):
    """Attention as running sums of phi(k_j) v_j^T and phi(k_j), without logits."""

    part: LinearConfig

    def attend(self, inputs: Inputs) -> Tensor:
        """Return the weighted sums (B, H, n, D), and add the tokens to the cache's running sums.

        Computed in float32 under autocast too: sums over thousands of tokens overflow or lose half
        precision. Raises ValueError for a mask of pairs of tokens.
        """
        past, masks = inputs.cache, inputs.masks
        assert past is None or isinstance(past, RunningSums)
        if masks.without_self:
            raise ValueError("linear keys never form the logits that would mask a token's own key")
        if past is not None and masks.attn_mask is not None and not masks.is_cross:
            raise ValueError("linear keys need causal attention without a mask for a cache")
        keys, v = inputs.shared(inputs.keys), inputs.shared(inputs.v.transpose(1, 2))
        with without_autocast(v):
            k = self._mixed(wide(keys), 0 if past is None else past.position)
            if (mask := masks.attn_mask) is not None:
                if mask.dtype != torch.bool or mask.ndim < 2 or mask.shape[-2] != 1:
                    text = "a boolean mask of present keys, (B, 1, 1, n)"
                    raise ValueError(f"linear keys take {text}")
                # Later calls for the same memory have its mask and no new keys.
                k = k.masked_fill(~mask.transpose(-1, -2)[..., : k.shape[-2], :], 0)
            out = self._divided(self._phi(wide(inputs.q)), k, wide(v), masks.is_causal, past)
            if past is not None:
                past.add(k, wide(v))
            return out.to(v.dtype)

    def weights(self, inputs: Inputs) -> Tensor:
        """Return the weights (B, H, n, n): the sums of values that are unit vectors."""
        n, v = inputs.keys.shape[-2], inputs.v
        unit = torch.eye(n, dtype=v.dtype, device=v.device)
        return self.attend(inputs._replace(v=unit.unsqueeze(1).expand(len(v), n, 1, n)))

    def new_cache(self, window: int | None) -> Cache:
        return RunningSums()

    def _phi(self, x: Tensor) -> Tensor:
        x = F.elu(x) + 1
        return x / x.sum(-1, keepdim=True) if self.part.features == "sum-to-one" else x

    def _mixed(self, keys: Tensor, first: int) -> Tensor:
        """Return sum_r pi_r phi(k_jr), or phi of the mixed key (B, H, n, D)."""
        log_prior = self.log_prior(keys.shape[-2], first)
        prior: Tensor | float = 1 / self.part.keys
        if isinstance(log_prior, Tensor):
            prior = log_prior.exp().unsqueeze(-1)
        if self.part.mixing == "before":
            return self._phi((prior * keys).sum(2))
        return (prior * self._phi(keys)).sum(2)

    def _divided(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, past: RunningSums | None
    ) -> Tensor:
        """Return the sum over keys divided as `divide_by` says."""
        before = 0 if past is None else past.position
        n, root = before + k.shape[-2], math.sqrt(q.shape[-1])
        out = causal_sums(q, k, v) if is_causal else q @ (k.transpose(-1, -2) @ v)
        if past is not None and past.products is not None:
            out = out + q @ past.products
        if self.part.divide_by == "root-length":
            if not is_causal:
                return out / math.sqrt(n)
            lengths = torch.arange(before + 1, n + 1, dtype=q.dtype, device=q.device)
            return out / lengths.sqrt().unsqueeze(-1)
        key_sum = k.cumsum(-2) if is_causal else k.sum(-2, keepdim=True)
        if past is not None and past.keys is not None:
            key_sum = key_sum + past.keys
        total = (q * key_sum).sum(-1, keepdim=True)
        scaled = total * root if self.part.divide_by == "scaled-sum" else total
        return out / (scaled + LINEAR_OFFSET * root)


def causal_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q_i.sum_{j <= i} k_j v_j^T, chunk by chunk: earlier chunks enter as one D x D sum."""
    n = q.shape[-2]
    # One decoded token is a chunk of one token.
    size = SUMS_CHUNK if n > 1 else 1
    q, k, v = (F.pad(x, (0, 0, 0, -n % size)).unflatten(-2, (-1, size)) for x in (q, k, v))
    sums = k.transpose(-1, -2) @ v
    before = sums.cumsum(2) - sums
    out = q @ before + (q @ k.transpose(-1, -2)).tril() @ v
    return out.flatten(-3, -2)[..., :n, :]
