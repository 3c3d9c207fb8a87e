"""Mixtures of several keys for every token.

Mixture of Gaussian Keys (MGK): Nguyen et al. 2022, "Improving Transformers with Probabilistic
Attention Keys", https://arxiv.org/abs/2110.08678, section 2, eq. 7, Tables 5 and 6.

Shapes: B batch, n tokens, n' tokens with keys, d width, H heads, H' key heads, D head width, M keys
for every token, E width of the features, c queries of a chunk.
"""

import functools
import math
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention.dispatch import bias_in_columns
from lit_attn.attention.formed import large_chunk
from lit_attn.attention.masks import CHUNK, Masks, in_chunks
from lit_attn.attention.parts import LayerShape
from lit_attn.attention.precision import as_multiplied, multiply, rounded_terms, square, wide
from lit_attn.attention.similarity import Similarity, SimilarityConfig
from lit_attn.attention.statistics import Reduce, one_unless_repeated
from lit_attn.schema.base import consistency_check

# Added to the divisors of the responsibilities of Soft-E, as in MGK's code.
RESPONSIBILITY_OFFSET = 1e-6

# Axes of the sums of responsibilities (H, M, n') that share one pi, by the `prior_scope`.
AXES_WITH_ONE_PRIOR: dict[str, tuple[int, ...]] = {
    "head": (-1,),
    "layer": (0, -1),
    "position": (),
}


class MixedKeysConfig(SimilarityConfig):
    """Several keys for every token (MGK section 2)."""

    keys: int = Field(2, ge=1, le=16, description="keys of every token, M")
    source: Literal["projected", "shifted"] = Field(
        "projected",
        description="projected: a projection for each key (option A); shifted: one "
        "projected key plus learned offsets (option B)",
    )
    prior: Literal["learned", "clamped", "m-step", "fixed"] = Field(
        "learned",
        description="weights pi_r of the keys; learned: softmax of parameters; clamped: parameters "
        "clamped to [0, 1], as the released code; m-step: after every training step, the mean "
        "responsibility in its complete batch, over all micro-batches and devices (Soft-E), with "
        "1e-6 in its divisor, as the released code; fixed: 1 / M",
    )
    prior_scope: Literal["head", "layer", "position"] = Field(
        "head",
        description="unit with its own pi: each head (paper), each layer (released LRA code), "
        "or every head and key position (released language model code)",
    )
    positions: int = Field(
        256, ge=1, description="key positions with their own pi, for `prior_scope: position`"
    )
    shift_init: Literal["normal", "released"] = Field(
        "normal",
        description="initial offsets; normal: N(0, 1) (paper); released: the first is 0, "
        "the others N(0, 1/4)",
    )

    @consistency_check
    def _refuse_choices_without_effect(self) -> None:
        """Refuse a choice without effect: two cells would then compute the same."""
        if self.source == "projected" and self.shift_init != "normal":
            raise ValueError("shift_init: projected keys have no offsets")
        if self.prior == "fixed" and self.prior_scope != "head":
            raise ValueError("prior_scope: has no effect with `prior: fixed`")
        if self.prior_scope != "position" and self.positions != 256:
            raise ValueError("positions: has no effect without `prior_scope: position`")

    @property
    def learns_prior(self) -> bool:
        """True if pi is a parameter: with several keys, unless their largest logit counts."""
        is_hard = getattr(self, "assignment", "soft") == "hard"
        return self.keys > 1 and self.prior in ("learned", "clamped") and not is_hard

    def exempt_parameters(self) -> tuple[str, ...]:
        names = []
        if self.learns_prior:
            names.append("prior")
        if self.source == "shifted":
            names.append("shift")
        return tuple(names)

    def find_own_keys_use(self) -> str:
        return "computes further keys of each token"

    @property
    def counts_queries(self) -> bool:
        return self.prior == "m-step"

    @property
    def max_tokens(self) -> int | None:
        return self.positions if self.prior_scope == "position" else None

    def reference_keys(self, module: Any, x: Tensor, k: Tensor) -> list[Tensor]:
        """MGK section 2.2: projections of every key (A), or one key plus offsets (B)."""
        if module.part.source == "shifted":
            return [k + module.shift[r].flatten() for r in range(module.part.keys)]
        if module.part.keys == 1:
            return [k]
        return [k, *module.more(x).chunk(module.part.keys - 1, dim=-1)]

    def reference_log_prior(self, module: Any, r: int, n: int) -> Tensor:
        """log pi_r, broadcastable to (H, n)."""
        if module.part.prior == "fixed" or module.part.keys == 1:
            return torch.tensor([[1 / module.part.keys]], dtype=torch.double).log()
        prior = module.prior[..., :n]
        if module.part.prior == "learned":
            return torch.log_softmax(prior, dim=0)[r]
        return prior[r].clamp(1e-38, 1).log()


class MixedKeys(Similarity):
    """M keys for every token: projected or shifted, with weights pi_r."""

    part: MixedKeysConfig

    def __init__(self, part: MixedKeysConfig, shape: LayerShape) -> None:
        super().__init__(part, shape)
        m = part.keys
        key_heads = shape.key_heads
        width = shape.head_dim
        if part.source == "projected" and m > 1:
            added = (m - 1) * key_heads * width
            self.more = nn.Linear(shape.dim, added, bias=shape.qkv_bias, **shape.options)
        if part.source == "shifted":
            self.shift = nn.Parameter(torch.empty(m, key_heads, width, **shape.options))
        sizes = {
            "head": (m, shape.heads, 1),
            "layer": (m, 1, 1),
            "position": (m, shape.heads, part.positions),
        }
        size = sizes[part.prior_scope]
        # A hard assignment takes the largest logit, which needs no weights of the keys.
        is_weighted = m > 1 and not self.hard
        if is_weighted and part.prior in ("learned", "clamped"):
            self.prior = nn.Parameter(torch.empty(size, **shape.options))
        elif is_weighted and part.prior == "m-step":
            self.register_buffer("prior", torch.empty(size, **shape.options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the offsets as `shift_init` says, and set every pi to 1 / M."""
        with torch.no_grad():
            if self.part.source == "shifted":
                nn.init.normal_(self.shift)
                if self.part.shift_init == "released":
                    self.shift.mul_(0.5)
                    self.shift[0].zero_()
            if hasattr(self, "prior"):
                # The softmax of equal parameters is 1 / M too.
                start = 0.0 if self.part.prior == "learned" else 1 / self.part.keys
                self.prior.fill_(start)

    def keys(self, x: Tensor, k: Tensor) -> Tensor:
        if self.part.source == "shifted":
            return k.unsqueeze(2) + self.shift
        if self.more is None:
            return k.unsqueeze(2)
        heads, width = k.shape[-2:]
        more = self.more(x).unflatten(-1, (self.part.keys - 1, heads, width))
        return torch.cat([k.unsqueeze(2), more], 2)

    def log_prior(self, n: int, first: int = 0) -> Tensor | float:
        """Return log pi_r; raise ValueError beyond the positions that have a pi."""
        if not hasattr(self, "prior"):
            return -math.log(self.part.keys)
        prior: Tensor = self.prior
        if self.part.prior_scope == "position":
            if first + n > self.part.positions:
                raise ValueError(
                    f"{first + n} tokens, but the mixture's weights are for "
                    f"{self.part.positions} positions"
                )
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


class MixtureConfig(MixedKeysConfig, kind="mixture"):
    """Soft: log sum_r pi_r exp(s_ijr); hard: max_r s_ijr (MGK eq. 7, 8; Hard-E)."""

    kernel: Literal["gaussian", "dot"] = Field(
        "gaussian", description="logits of each key: Gaussian distance or scaled dot product"
    )
    assignment: Literal["soft", "hard"] = Field(
        "soft", description="soft: log of the sum over keys; hard: the largest logit (Hard-E)"
    )
    variance: tuple[PositiveFloat, ...] | Literal["learned"] | None = Field(
        None,
        description="sigma_r^2 of each key's Gaussian in units of sqrt(D); null: 1; (1, 3) in the "
        "paper's section 3.4, (1, 1/3) in the released language model code; learned: exp of a "
        "parameter for each r, 1 at first",
    )
    variance_scope: Literal["layer", "head"] = Field(
        "layer",
        description="unit with its own sigma_r^2 for `variance: learned`: each layer or each head; "
        "all tokens share it (sigma_jr in MGK eq. 5-7 is that of key r of token j)",
    )

    @consistency_check
    def _makes_sense(self) -> None:
        if isinstance(self.variance, tuple) and len(self.variance) != self.keys:
            raise ValueError(f"variance: has {len(self.variance)} values for {self.keys} keys")
        if self.variance is not None and self.kernel == "dot":
            raise ValueError("variance: has no effect with `kernel: dot`")
        if self.variance_scope != "layer" and self.variance != "learned":
            raise ValueError("variance_scope: has no effect without `variance: learned`")
        for key, default in (("prior", "learned"), ("prior_scope", "head")):
            if self.assignment == "hard" and getattr(self, key) != default:
                raise ValueError(f"{key}: has no effect with `assignment: hard`")

    def exempt_parameters(self) -> tuple[str, ...]:
        return (*super().exempt_parameters(), *self.stacked_vectors())

    def stacked_vectors(self) -> tuple[str, ...]:
        return ("log_variance",) if self.variance_scope == "head" else ()

    def build(self, shape: LayerShape) -> Any:
        return Mixture(self, shape)

    def reference(self, module: Any, q: Tensor, keys: list[Tensor], tau: Tensor | float) -> Tensor:
        """MGK (7); with the hard assignment the largest of its terms, without pi."""
        unit = math.sqrt(q.shape[-1])
        variances = [1.0] * len(keys)
        if module.part.variance == "learned":
            # (M,), or (M, H, 1, 1) if each head has its own
            variances = module.log_variance.exp()
            if module.part.variance_scope == "head":
                variances = variances.T.unsqueeze(-1).unsqueeze(-1)
        elif module.part.variance is not None:
            variances = module.part.variance
        terms = []
        for r, key in enumerate(keys):
            if module.part.kernel == "dot":
                term = q @ key.transpose(-1, -2) / unit
            else:
                term = -measure_distances(q, key) / (2 * variances[r] * unit)
            if module.part.assignment == "soft":
                term = term + self.reference_log_prior(module, r, key.shape[-2]).unsqueeze(-2)
            terms.append(tau * term)
        stacked = torch.stack(terms)
        return stacked.amax(0) if module.part.assignment == "hard" else stacked.logsumexp(0)


class GaussianConfig(SimilarityConfig, kind="gaussian"):
    """s_ij = -|q_i - k_j|^2 / (2 sqrt(D)) (MGK eq. 7 with one key)."""

    def build(self, shape: LayerShape) -> Any:
        return MixtureConfig(keys=1).build(shape)

    def reference(self, module: Any, q: Tensor, keys: list[Tensor], tau: Tensor | float) -> Tensor:
        part: MixtureConfig = module.part
        return part.reference(module, q, keys, tau)


class Mixture(MixedKeys):
    """s_ijr of a Gaussian or dot kernel, with log pi_r where the assignment is soft."""

    part: MixtureConfig
    observes_compiled = True

    def __init__(self, part: MixtureConfig, shape: LayerShape) -> None:
        self.hard = part.assignment == "hard"
        super().__init__(part, shape)
        self.width = shape.head_dim
        self.unit = math.sqrt(shape.head_dim)
        # Python numbers: a buffer outside the state dict would have no values in a layer that is
        # built on the meta device and then loads its weights.
        self.fixed_variances: tuple[float, ...] = (1.0,) * part.keys
        if isinstance(part.variance, tuple):
            self.fixed_variances = part.variance
        learns_variances = part.variance == "learned"
        if learns_variances:
            size: tuple[int, ...] = (part.keys,)
            if part.variance_scope == "head":
                size = (shape.heads, part.keys)
            self.log_variance = nn.Parameter(torch.zeros(size, **shape.options))
        # Sums of the training step's responsibilities and, in the last row, of its pairs of tokens:
        # (H, M + 1, positions), with 1 where heads or positions share a pi.
        self.sums: Tensor | None = None
        # |q_i|^2 cancels in the softmax unless keys of one token weigh it differently.
        keys_differ = learns_variances or len(set(self.fixed_variances)) > 1
        needs_square = self.needs_row_terms or keys_differ
        self.query_matters = part.kernel == "gaussian" and needs_square
        self.varies = learns_variances or set(self.fixed_variances) != {1.0}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "log_variance"):
            nn.init.zeros_(self.log_variance)

    def variances(self, keys: Tensor) -> Tensor:
        if hasattr(self, "log_variance"):
            return torch.atleast_2d(wide(self.log_variance).exp())
        values = [wide(keys).new_full((1, 1), number) for number in self.fixed_variances]
        return torch.cat(values, dim=1)

    def features(self, q: Tensor, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return `biased_features` with the bias in further columns of the features."""
        return bias_in_columns(*self.biased_features(q, keys, first))

    def biased_features(
        self, q: Tensor, keys: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return [q | |q|^2 terms], [k / sigma^2 | factors / sigma^2] and the offset of each key.

        The offset is sqrt(D) log pi - |k|^2 / (2 sigma^2). Where -|q|^2 / 2 matters, it is one
        further column of the features, or several in half precision.
        """
        q = as_multiplied(q)
        keys = as_multiplied(keys)
        offset: Tensor | float = 0.0
        if not self.hard:
            offset = self.unit * self.log_prior(keys.shape[-2], first)
        variance: Tensor | None = None
        if self.varies:
            variance = self.variances(keys).unsqueeze(-1).unsqueeze(-1)
        if self.part.kernel == "gaussian":
            half_square = square(keys) / 2
            if variance is not None:
                half_square = half_square / variance
                keys = keys / variance.to(keys.dtype)
            offset = offset - half_square.squeeze(-1)
        if not isinstance(offset, Tensor):
            offset = torch.full_like(wide(keys[..., 0]), offset)
        offset = offset.expand(keys.shape[:-1])
        if not self.query_matters:
            return q, keys, offset
        q_parts = [q]
        k_parts = [keys]
        factors = torch.ones_like(keys[..., :1])
        if variance is not None:
            factors = factors / variance.to(keys.dtype)
        for factor, term in rounded_terms(-square(q) / 2, q):
            q_parts.append(term)
            k_parts.append(factor * factors)
        return torch.cat(q_parts, -1), torch.cat(k_parts, -1), offset

    @property
    def has_statistics(self) -> bool:
        return self.part.prior == "m-step" and hasattr(self, "prior")

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, scale: float, masks: Masks) -> None:
        """Add the responsibilities of a forward pass to those of the training step.

        The sums are over the batch, over the pairs of tokens that attend, and over everything that
        shares a pi. Queries that are padding do not count.
        """
        keys = k.shape[-2]
        assigned: Tensor | float = 0.0
        pairs: Tensor | float = 0.0
        for rows in in_chunks(q.shape[-2], self._chunk_size(q, k, masks)):
            columns = masks.visible(rows, keys)
            # Each chunk needs the memory of the one before it: its tensors are local to `_count`.
            counts = self._count(q, k, scale, masks, rows, columns)
            hidden = (columns.start, keys - columns.stop)
            assigned = assigned + F.pad(counts[0], hidden)
            pairs = pairs + F.pad(counts[1], hidden)
        assert isinstance(assigned, Tensor)
        assert isinstance(pairs, Tensor)
        axes = AXES_WITH_ONE_PRIOR[self.part.prior_scope]
        if axes:
            assigned = assigned.sum(axes, keepdim=True)
            pairs = pairs.sum(axes, keepdim=True)
        sums = torch.cat([assigned, pairs], dim=1)
        if torch.compiler.is_compiling():
            sums = sums * one_unless_repeated(sums)
        # There can be fewer keys than positions with a prior.
        sums = F.pad(sums, (0, self.prior.shape[-1] - sums.shape[-1]))
        self.sums = sums if self.sums is None else self.sums + sums

    def _chunk_size(self, q: Tensor, k: Tensor, masks: Masks) -> int:
        """Return the number of queries whose responsibilities are computed at once."""
        is_compiling = torch.compiler.is_compiling()
        if q.device.type == "cpu" and not is_compiling:
            return CHUNK
        batch, heads, m, keys = k.shape[:4]
        bytes_of_a_query = batch * heads * m * keys * q.element_size()
        is_split = is_compiling and masks.is_causal
        return large_chunk(q.shape[-2], bytes_of_a_query, is_split)

    def _count(
        self, q: Tensor, k: Tensor, scale: float, masks: Masks, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """Return sums over the batch and the queries `rows` of q (B, H, n, E).

        They are the responsibilities of the keys `columns`, (H, M, m), and the numbers of queries
        that attend to them, (H, 1, m).
        """
        keys = k.shape[-2]
        q = q[:, :, rows]
        logits = wide(multiply("bhce,bhrme->bhcrm", q, k[..., columns, :], scale))
        if self.part.kernel == "gaussian" and not self.query_matters:
            # With the offset, |q_i|^2 does not cancel in the responsibilities.
            half_square = square(q[..., : self.width]).unsqueeze(-1) / 2
            logits = logits - scale * half_square / self.fixed_variances[0]
        weight = torch.ones_like(logits[:, :, :, 0])
        visible = masks.chunk(rows, columns, keys, q.device)
        if visible is not None:
            weight = weight * visible
        present = masks.present_queries(rows)
        if present is not None:
            weight = weight * present
        # With one term for each key, compiled code reads every logit once. One sum over queries and
        # the batch would be cut into parts that are written.
        logits_of_keys = logits.unbind(3)
        largest = functools.reduce(torch.maximum, logits_of_keys)
        exponentials = [(logit - largest).exp() for logit in logits_of_keys]
        offset = RESPONSIBILITY_OFFSET * (-largest).exp()
        divisor = functools.reduce(torch.add, exponentials) + offset
        responsibilities = [exponential / divisor for exponential in exponentials]
        assigned = [(share * weight).sum(2).sum(0) for share in responsibilities]
        return torch.stack(assigned, 1), weight.sum(2).sum(0).unsqueeze(1)

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


def measure_distances(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|^2, pair by pair."""
    return (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
