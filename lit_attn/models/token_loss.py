"""Cross-entropy of next tokens from hidden states, without the logits of all tokens at once.

A language model has N x V logits for N tokens and V token ids. With GPT-2's vocabulary, the logits
of 8,192 tokens take 1.6 GB in float32, and PyTorch's cross-entropy keeps several copies of them.
Here the tokens are cut into chunks of at most MAX_LOGITS logits. The forward pass keeps only the
log-sum-exp of each token, and the backward pass computes the logits of a chunk once more:

    z_i = W h_i                                            logits of token i
    loss_i = lse_i - (1 - s) z_i[t_i] - s mean(z_i)        s: label smoothing, lse: log-sum-exp
    dloss_i / dz_i = softmax(z_i) - (1 - s) onehot(t_i) - s / V

A cap c replaces z_i by c tanh(z_i / c), whose derivative is 1 - tanh^2 (Gemma 2,
https://arxiv.org/abs/2408.00118). A z-loss adds w lse_i^2, whose derivative is
2 w lse_i softmax(z_i) (PaLM, https://arxiv.org/abs/2204.02311, section 5).

Up to MAX_LOGITS logits there is one chunk, and PyTorch's own cross-entropy computes it. A CPU
computes the logits of tokens with a target alone.

Shapes: N tokens, d width, V vocabulary, C tokens of a chunk. hidden: (N, d), weight: (V, d),
targets: (N,) int64; a target that is IGNORED has loss 0 and no gradient.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.derivatives import refuse_forward_mode, refuse_second_derivatives
from lit_attn.attention.precision import as_multiplied, wide, without_autocast
from lit_attn.data.text.ids import IGNORED

MAX_LOGITS = 2**26
"""Most logits that exist at once (256 MiB in float32)."""


class LossTerms(NamedTuple):
    """Choices of the loss of a token: label smoothing s, cap c of its logits, weight w of lse^2."""

    label_smoothing: float = 0.0
    logit_cap: float | None = None
    z_loss: float = 0.0


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(logits / cap) in float32 or wider, or unchanged logits without a cap."""
    if cap is None:
        return logits
    return cap * torch.tanh(wide(logits) / cap)


def is_chunked(tokens: int, vocabulary: int) -> bool:
    """Return True if the losses of so many tokens are computed in chunks."""
    return tokens * vocabulary > MAX_LOGITS


def find_targets(targets: Tensor) -> Tensor | None:
    """Return which of the tokens have a target, (N,) bool; None if all count as having one.

    On a GPU all count: the process would wait for the number of targets, which no recorded step
    knows. So do fake tensors, which have no values.
    """
    has_values = type(targets) is Tensor
    if not has_values or targets.device.type != "cpu":
        return None
    is_target = targets != IGNORED
    return None if bool(is_target.all()) else is_target


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    logit_cap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy (N,) of every token in nats, in float32 or wider.

    `label_smoothing` is the share of the target's probability that goes to all V ids equally, as in
    `torch.nn.functional.cross_entropy`. `logit_cap` is c of c tanh(logits / c), and `z_loss` the
    factor of the squared log-sum-exp that is added.
    """
    terms = LossTerms(label_smoothing, logit_cap, z_loss)
    is_target = find_targets(targets)
    if is_target is not None:
        losses = token_losses(hidden[is_target], weight, targets[is_target], *terms)
        return losses.new_zeros(len(targets)).masked_scatter(is_target, losses)
    if not is_chunked(hidden.shape[0], weight.shape[0]):
        return _unchunked(hidden, weight, targets, terms, "none")
    refuse_forward_mode(hidden, weight)
    losses = ChunkedLosses.apply(
        as_multiplied(hidden), weight, as_multiplied(weight).dtype, targets, terms
    )
    assert isinstance(losses, Tensor)
    return losses


def total_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return the sum of `token_losses`."""
    is_target = find_targets(targets)
    if is_target is not None:
        hidden, targets = hidden[is_target], targets[is_target]
    if not is_chunked(hidden.shape[0], weight.shape[0]):
        return _unchunked(hidden, weight, targets, LossTerms(label_smoothing), "sum")
    return token_losses(hidden, weight, targets, label_smoothing).sum()


def _unchunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, terms: LossTerms, reduction: str
) -> Tensor:
    """Return PyTorch's cross-entropy of all logits at once."""
    logits = cap_logits(wide(F.linear(hidden, weight)), terms.logit_cap)
    losses = F.cross_entropy(
        logits,
        targets,
        ignore_index=IGNORED,
        reduction=reduction,
        label_smoothing=terms.label_smoothing,
    )
    if not terms.z_loss:
        return losses
    squares = logits.logsumexp(-1).square().where(targets != IGNORED, 0)
    return losses + terms.z_loss * (squares if reduction == "none" else squares.sum())


class ChunkedLosses(torch.autograd.Function):
    """Losses (N,) of tokens, computed for one chunk of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        multiplied: torch.dtype,
        targets: Tensor,
        terms: LossTerms,
    ) -> Tensor:
        """Return the losses. `multiplied` is the precision in which `weight` is multiplied."""
        with without_autocast(hidden):
            factor = weight.to(multiplied)
            losses = []
            sums = []
            for chunk in split_tokens(hidden.shape[0], weight.shape[0]):
                logits = cap_logits(wide(hidden[chunk] @ factor.T), terms.logit_cap)
                log_sums = logits.logsumexp(-1)
                sums.append(log_sums)
                losses.append(_losses(logits, log_sums, targets[chunk], terms))
        ctx.save_for_backward(hidden, weight, targets, torch.cat(sums))
        ctx.multiplied = multiplied
        ctx.terms = terms
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`. Second derivatives raise RuntimeError."""
        (gradient,) = gradients
        hidden, weight, *_ = ctx.saved_tensors
        computed = ChunkedLosses._compute_gradients(ctx, gradient)
        guarded = refuse_second_derivatives(computed, [gradient, hidden, weight])
        return *guarded, None, None, None

    @staticmethod
    @torch.no_grad()
    def _compute_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `hidden` and `weight`; that of `weight` is summed in float32."""
        hidden, weight, targets, log_sums = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = None
        if needs_weight:
            weight_gradient = torch.zeros_like(weight, dtype=wide(weight[:0]).dtype)
        with without_autocast(hidden):
            factor = weight.to(ctx.multiplied)
            for chunk in split_tokens(hidden.shape[0], weight.shape[0]):
                logits = cap_logits(wide(hidden[chunk] @ factor.T), ctx.terms.logit_cap)
                logits_gradient = _logits_gradient(
                    logits, log_sums[chunk], targets[chunk], gradient[chunk], ctx.terms
                ).to(factor.dtype)
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = logits_gradient @ factor
                if weight_gradient is not None:
                    weight_gradient += logits_gradient.T @ hidden[chunk]
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient


def split_tokens(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield chunks of nearly equal numbers of tokens, of at most MAX_LOGITS logits each."""
    most_tokens = max(1, MAX_LOGITS // vocabulary)
    count = math.ceil(tokens / most_tokens)
    size = math.ceil(tokens / count)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _losses(logits: Tensor, log_sums: Tensor, targets: Tensor, terms: LossTerms) -> Tensor:
    """Return the losses (C,) of a chunk from its logits (C, V) and their log-sum-exp (C,)."""
    label_smoothing = terms.label_smoothing
    is_target = targets != IGNORED
    places = targets.where(is_target, 0)[:, None]
    expected = (1 - label_smoothing) * logits.gather(1, places).squeeze(1)
    if label_smoothing:
        expected += label_smoothing * logits.mean(-1)
    losses = log_sums - expected
    if terms.z_loss:
        losses += terms.z_loss * log_sums.square()
    return losses.where(is_target, 0)


def _logits_gradient(
    logits: Tensor, log_sums: Tensor, targets: Tensor, gradient: Tensor, terms: LossTerms
) -> Tensor:
    """Return the gradient of the logits (C, V) of a chunk before their cap.

    `logits` are capped. Without a cap the result has the memory of `logits`.
    """
    label_smoothing = terms.label_smoothing
    slopes = None
    if terms.logit_cap is not None:
        slopes = 1 - (logits / terms.logit_cap).square()
    is_target = targets != IGNORED
    places = targets.where(is_target, 0)[:, None]
    probabilities = logits.sub_(log_sums[:, None]).exp_()
    if terms.z_loss:
        probabilities.mul_(1 + 2 * terms.z_loss * log_sums[:, None])
    if label_smoothing:
        probabilities.sub_(label_smoothing / logits.shape[1])
    ones = torch.full_like(probabilities[:, :1], label_smoothing - 1)
    difference = probabilities.scatter_add_(1, places, ones)
    difference.mul_(gradient.where(is_target, 0)[:, None])
    return difference if slopes is None else difference.mul_(slopes)
