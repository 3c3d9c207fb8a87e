"""Floors of text: interpolated counts of the preceding tokens, and a general compressor.

Source: Witten and Bell 1991, "The zero-frequency problem", in its interpolated form. With c(h w)
the count of token w after the context h, c(h) their sum over w, T(h) the number of different w, and
h' the context h without its first token,

    p(w | h) = (c(h w) + T(h) p(w | h')) / (c(h) + T(h)),

and the probability without counts is 1 / V.

Shapes: rows (R, n) of token ids, of which each is predicted from those before it in its row.
"""

import lzma
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn.floors.base import Floor

Ids = NDArray[np.int64]

COUNT_RULES = ("counts of preceding tokens (seen)", "counts of preceding tokens (all)")
"""Names of the counts before the number of preceding tokens is known."""

COMPRESSOR = "xz"

LONGEST_CONTEXT = 5
"""Most preceding tokens that are counted."""


class _Order(NamedTuple):
    """Counts of one length of context.

    `contexts` are the sorted codes of the contexts, each made of the number of the shorter context
    and the token before it. `events` are sorted codes of context and next token.
    """

    contexts: Ids
    totals: Ids
    kinds: Ids
    events: Ids
    event_counts: Ids


class Counts:
    """Counts of tokens after contexts of 0 to `longest` tokens, for probabilities of other rows."""

    def __init__(self, rows: Ids, vocabulary: int, longest: int = LONGEST_CONTEXT) -> None:
        self.vocabulary = vocabulary
        self.orders: list[_Order] = []
        tokens = np.asarray(rows, dtype=np.int64)
        # A negative number stands for a context that a row is too short for.
        numbers = np.zeros_like(tokens)
        for length in range(longest + 1):
            codes = numbers if length == 0 else self._extend(numbers, tokens, length)
            is_known = codes >= 0
            contexts = np.unique(codes[is_known])
            numbers = _find(contexts, codes)
            event_codes = numbers[is_known] * vocabulary + tokens[is_known]
            events, event_counts = np.unique(event_codes, return_counts=True)
            event_contexts = events // vocabulary
            totals = np.bincount(event_contexts, event_counts, len(contexts)).astype(np.int64)
            kinds = np.bincount(event_contexts, minlength=len(contexts))
            self.orders.append(_Order(contexts, totals, kinds, events, event_counts))

    def probabilities(self, rows: Ids) -> list[NDArray[np.float64]]:
        """Return p of each token of `rows`, (R, n), for each longest context from 0 tokens on."""
        tokens = np.asarray(rows, dtype=np.int64)
        numbers = np.zeros_like(tokens)
        probability = np.full(tokens.shape, 1 / self.vocabulary)
        results = []
        for length, order in enumerate(self.orders):
            codes = numbers if length == 0 else self._extend(numbers, tokens, length)
            numbers = _find(order.contexts, codes)
            is_known = numbers >= 0
            context = np.where(is_known, numbers, 0)
            event = _find(order.events, context * self.vocabulary + tokens)
            count = np.where(event >= 0, order.event_counts[event], 0)
            total, kinds = order.totals[context], order.kinds[context]
            interpolated = (count + kinds * probability) / (total + kinds)
            probability = np.where(is_known, interpolated, probability)
            results.append(probability)
        return results

    def _extend(self, numbers: Ids, tokens: Ids, length: int) -> Ids:
        """Return codes of contexts of `length` tokens from the numbers of those one shorter.

        A code is negative where the row has fewer tokens before, or the shorter context is unknown.
        """
        codes = np.full_like(numbers, -1)
        earlier = tokens[:, :-length]
        shorter = numbers[:, length:]
        codes[:, length:] = np.where(shorter >= 0, shorter * self.vocabulary + earlier, -1)
        return codes


def _find(sorted_codes: Ids, codes: Ids) -> Ids:
    """Return the places of `codes` in `sorted_codes`, or -1 where a code is not among them."""
    if not len(sorted_codes):
        return np.full_like(codes, -1)
    places = np.searchsorted(sorted_codes, codes)
    places = np.minimum(places, len(sorted_codes) - 1)
    return np.where(sorted_codes[places] == codes, places, -1)


class Targets(NamedTuple):
    """Rows of tokens (R, n), and the mask (R, n) of the tokens that are predicted."""

    rows: Ids
    mask: NDArray[np.bool_]


def count_floor(counts: Counts, chosen_on: Targets, evaluated: Targets) -> tuple[int, float]:
    """Return the length of context that is best on `chosen_on`, and its loss on `evaluated`.

    The loss is in nats per token.
    """
    by_length = counts.probabilities(chosen_on.rows)
    losses = [_mean_loss(probability, chosen_on.mask) for probability in by_length]
    length = int(np.argmin(losses))
    probability = counts.probabilities(evaluated.rows)[length]
    return length, _mean_loss(probability, evaluated.mask)


def _mean_loss(probability: NDArray[np.float64], mask: NDArray[np.bool_]) -> float:
    """Return the mean of -log p over the tokens of the mask."""
    return float(-np.log(probability[mask]).mean())


def language_values(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """Return the metrics of a language model with `loss` nats per token."""
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if bytes_per_token is not None:
        values["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return values


def compress_floor(training: bytes, evaluated: bytes) -> Floor:
    """Return the bits per byte that xz needs for `evaluated` when it has `training` before it."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 26}]
    alone = len(lzma.compress(training, format=lzma.FORMAT_RAW, filters=filters))
    both = len(lzma.compress(training + evaluated, format=lzma.FORMAT_RAW, filters=filters))
    bits = 8 * (both - alone) / len(evaluated)
    conditions = f"{len(training):,} bytes of training text before the {len(evaluated):,} bytes"
    return Floor(COMPRESSOR, {"bits_per_byte": bits}, conditions)
