"""Floors of text: counts against dictionaries, the choice of the context, and xz."""

import lzma
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from lit_attn.floors.counts import Counts, Targets, compress_floor, count_floor, language_values


def count_by_hand(rows: np.ndarray, longest: int) -> dict[tuple[int, ...], Counter[int]]:
    """Return the counts of the next token by context, a tuple of up to `longest` tokens."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in rows.tolist():
        for place, token in enumerate(row):
            for length in range(min(longest, place) + 1):
                counts[tuple(row[place - length : place])][token] += 1
    return counts


def probability_by_hand(
    counts: dict[tuple[int, ...], Counter[int]], context: list[int], token: int, vocabulary: int
) -> float:
    """Return p of `token` after `context`, by Witten and Bell's recursion."""
    shorter = (
        probability_by_hand(counts, context[1:], token, vocabulary) if context else 1 / vocabulary
    )
    known = counts.get(tuple(context))
    if known is None:
        return shorter
    kinds = len(known)
    return (known[token] + kinds * shorter) / (known.total() + kinds)


@pytest.mark.parametrize("longest", [0, 1, 3])
def test_probabilities_equal_those_of_dictionaries(longest: int) -> None:
    generator = np.random.default_rng(0)
    fitted = generator.integers(4, size=(6, 20))
    evaluated = generator.integers(5, size=(3, 9))
    probabilities = Counts(fitted, 5, longest).probabilities(evaluated)
    assert len(probabilities) == longest + 1
    counts = count_by_hand(fitted, longest)
    for length, probability in enumerate(probabilities):
        for row, tokens in enumerate(evaluated.tolist()):
            for place, token in enumerate(tokens):
                context = tokens[max(0, place - length) : place]
                expected = probability_by_hand(counts, context, token, 5)
                assert probability[row, place] == pytest.approx(expected, rel=1e-12)


def test_probabilities_of_all_tokens_add_up_to_one() -> None:
    fitted = np.random.default_rng(1).integers(3, size=(4, 30))
    counts = Counts(fitted, 4, 2)
    total = np.zeros(3)
    for token in range(4):
        rows = np.array([[1, 2, token]])
        total += [probability[0, 2] for probability in counts.probabilities(rows)]
    np.testing.assert_allclose(total, 1, rtol=1e-12)


def test_the_context_is_chosen_on_other_rows() -> None:
    generator = np.random.default_rng(2)
    # A token repeats the one before it in the fitted rows, and not in the evaluated ones.
    fitted = np.repeat(generator.integers(8, size=(20, 40)), 2, axis=1)
    other = generator.integers(8, size=(20, 80))
    counts = Counts(fitted, 8, 1)
    everything = np.ones(other.shape, dtype=bool)
    similar = np.repeat(generator.integers(8, size=(20, 40)), 2, axis=1)
    length, loss = count_floor(counts, Targets(similar, everything), Targets(other, everything))
    assert length == 1
    # The choice on similar rows is worse than no context on the evaluated ones.
    assert loss > math.log(8)
    length, _ = count_floor(counts, Targets(other, everything), Targets(similar, everything))
    assert length == 0


def test_only_tokens_of_the_mask_count() -> None:
    rows = np.array([[0, 1, 0, 1]])
    counts = Counts(rows, 2, 0)
    mask = np.array([[False, True, False, False]])
    _, loss = count_floor(counts, Targets(rows, mask), Targets(rows, mask))
    assert loss == pytest.approx(-math.log(0.5))


def test_bits_per_byte_follow_from_the_loss() -> None:
    values = language_values(math.log(2), 0.5)
    assert values["bits_per_byte"] == pytest.approx(2)
    assert values["perplexity"] == pytest.approx(2)
    assert "bits_per_byte" not in language_values(1.0, None)


def test_xz_knows_the_training_text() -> None:
    text = bytes(np.random.default_rng(3).integers(256, size=4000, dtype=np.uint8))
    # Random bytes need 8 bits each, and nothing when they stand in the training text.
    assert compress_floor(b"a" * 100, text).values["bits_per_byte"] == pytest.approx(8, abs=0.2)
    assert compress_floor(text, text).values["bits_per_byte"] < 0.3
    sentence = b"the quick brown fox jumps over the lazy dog. " * 50
    alone = 8 * len(lzma.compress(sentence)) / len(sentence)
    assert compress_floor(sentence, sentence).values["bits_per_byte"] < alone
