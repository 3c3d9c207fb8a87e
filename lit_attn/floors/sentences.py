"""Floors of translation: copies, the nearest training sentence, and translation word by word.

Sentences are texts with one space between two words. Source of the last rule: model 1 of Brown,
Della Pietra, Della Pietra and Mercer 1993, "The mathematics of statistical machine translation",
without its empty word. With t(f | e) the probability that word e is translated by word f, and
c(f, e) the expected number of times that it was,

    c(f, e) = sum over the pairs with f and e of t(f | e) / (sum of t(f | e') over the words e'),
    t(f | e) = c(f, e) / (sum of c(f', e) over all words f'),

and t is uniform at first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn.floors.base import Floor, spread_places

Ids = NDArray[np.int64]
Score = Callable[[list[str], list[str]], float]
"""Function that returns BLEU from 0 to 1 of translations and their references."""

TRANSLATION_RULES = (
    "copy of the source",
    "translation of the nearest source",
    "word by word",
)

MOST_PAIRS = 30_000
"""Most training pairs that a rule is fitted to, evenly spread."""

MOST_EVALUATED = 2_000
"""Most evaluated pairs, evenly spread over the split."""

LONGEST_NGRAM = 3
"""Most words of the n-grams in which two sentences are compared."""

ROUNDS = 10
"""Rounds of the estimation of t(f | e)."""


class SentencePairs(NamedTuple):
    """Sources and their translations."""

    sources: list[str]
    targets: list[str]

    def spread(self, most: int) -> "SentencePairs":
        """Return at most `most` pairs, evenly spread."""
        places = spread_places(len(self.sources), most)
        sources = [self.sources[place] for place in places]
        targets = [self.targets[place] for place in places]
        return SentencePairs(sources, targets)


def translation_floors(train: SentencePairs, evaluated: SentencePairs, score: Score) -> list[Floor]:
    """Return the BLEU of three rules on evaluated pairs."""
    fitted, scored = train.spread(MOST_PAIRS), evaluated.spread(MOST_EVALUATED)
    nearest = find_nearest(fitted.sources, scored.sources)
    translations = (
        scored.sources,
        [fitted.targets[place] for place in nearest],
        translate_words(fitted, scored.sources),
    )
    conditions = f"{len(fitted.sources):,} training pairs, {len(scored.sources):,} evaluated"
    floors = []
    for rule, translated in zip(TRANSLATION_RULES, translations, strict=True):
        values = {"bleu": score(translated, scored.targets)}
        floors.append(Floor(rule, values, conditions))
    return floors


def find_nearest(known: list[str], sentences: list[str]) -> list[int]:
    """Return the place of the nearest known sentence for each sentence, the first of equal ones.

    Nearness is twice the number of different n-grams that both have, divided by the sum of their
    numbers of different n-grams.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(
        analyzer="word",
        token_pattern=r"\S+",
        lowercase=False,
        ngram_range=(1, LONGEST_NGRAM),
        binary=True,
        dtype=np.int32,
    )
    try:
        known_ngrams = counter.fit_transform(known)
    except ValueError:
        # No known sentence has a word.
        return [0] * len(sentences)
    known_sizes = known_ngrams.sum(1).A1
    count_ngrams = counter.build_analyzer()
    nearest = []
    for sentence in sentences:
        shared = known_ngrams @ counter.transform([sentence]).T
        size = len(set(count_ngrams(sentence)))
        # Without any word on both sides the sum is zero.
        overlap = 2 * shared.toarray().ravel() / np.maximum(known_sizes + size, 1)
        nearest.append(int(overlap.argmax()))
    return nearest


def translate_words(train: SentencePairs, sentences: list[str]) -> list[str]:
    """Return each sentence with every known word replaced by its most probable translation."""
    dictionary = estimate_dictionary(train)
    translations = []
    for sentence in sentences:
        words = [dictionary.get(word, word) for word in sentence.split()]
        translations.append(" ".join(words))
    return translations


def estimate_dictionary(train: SentencePairs) -> dict[str, str]:
    """Return the most probable translation of each word; of equal ones the first in order."""
    source_rows = [sentence.split() for sentence in train.sources]
    target_rows = [sentence.split() for sentence in train.targets]
    source_words = sorted(set().union(*source_rows))
    target_words = sorted(set().union(*target_rows))
    events = _list_events(source_rows, target_rows, source_words, target_words)
    if not len(events.codes):
        return {}
    # One code for each pair of words that stand in one pair of sentences.
    codes, number = np.unique(events.codes, return_inverse=True)
    source = codes // len(target_words)
    probability = np.ones(len(codes))
    for _ in range(ROUNDS):
        weights = probability[number]
        weights /= np.bincount(events.positions, weights)[events.positions]
        expected = np.bincount(number, weights)
        probability = expected / np.bincount(source, expected)[source]
    dictionary: dict[str, str] = {}
    # The first entry of a word is its most probable one; lexsort keeps the order of equal ones.
    for place in np.lexsort((-probability, source)).tolist():
        word = source_words[source[place]]
        dictionary.setdefault(word, target_words[codes[place] % len(target_words)])
    return dictionary


class _Events(NamedTuple):
    """Words of a source beside words of its target.

    `codes` are (number of the source word) x (number of target words) + (number of the target
    word). `positions` count the words of all targets.
    """

    codes: Ids
    positions: Ids


def _list_events(
    source_rows: list[list[str]],
    target_rows: list[list[str]],
    source_words: list[str],
    target_words: list[str],
) -> _Events:
    """Return an event for each word of a source and each word of its target."""
    source_numbers = {word: number for number, word in enumerate(source_words)}
    target_numbers = {word: number for number, word in enumerate(target_words)}
    codes: list[Any] = [np.empty(0, np.int64)]
    positions: list[Any] = [np.empty(0, np.int64)]
    first = 0
    for source_row, target_row in zip(source_rows, target_rows, strict=True):
        source = np.array([source_numbers[word] for word in source_row], np.int64)
        target = np.array([target_numbers[word] for word in target_row], np.int64)
        table = source[:, None] * len(target_words) + target
        codes.append(table.ravel())
        positions.append(np.tile(first + np.arange(len(target)), len(source)))
        first += len(target)
    return _Events(np.concatenate(codes), np.concatenate(positions))
