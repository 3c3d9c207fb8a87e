"""Probes of recall: values that stand behind their keys, to be recalled when a key comes again.

Sources: `recall` is the multi-query associative recall of Arora et al. 2023, "Zoology"
(arXiv:2312.04927), in the arrangement of github.com/HazyResearch/zoology. `context-recall`,
`noisy-recall` and `fuzzy-recall` are three of the six tasks of Poli et al. 2024, "Mechanistic
Design and Scaling of Hybrid Architectures" (arXiv:2403.17844), in the arrangement of
github.com/athms/mad-lab. Tests compare sequences made here with recorded sequences of both, made
from the same draws.

Shapes: B sequences, n tokens, P pairs. Ids are int64.
"""

import math
from typing import Literal

import numpy as np
from probes import IGNORED, Ids, Probe, draw_distinct
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from lit_attn.schema.base import Share, consistency_check


class RecallConfig(Probe, kind="recall"):
    """Pairs of key and value, then the keys again in any order; the target is the key's value.

    Keys are ids from 1 to below V/2, values ids from V/2 on; both differ within a sequence. Gaps
    between a pair and its query follow a power law. All other tokens are random, or id 0.
    """

    pairs: PositiveInt = Field(4, description="pairs of key and value of a sequence")
    ids: PositiveInt = Field(32, description="token ids, of which about half are keys")
    gap_power: PositiveFloat = Field(
        0.01, description="exponent a of the gaps' distribution p(g) ~ g^(a - 1); 1: uniform"
    )

    fill: Literal["random", "zeros"] = Field(
        "random", description="tokens between the queries: random ids, or id 0, which is no key"
    )

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing among the values of the sequence."""
        return 1 / self.pairs

    @property
    def floor_loss(self) -> float:
        """Loss of giving the values of the sequence equal probabilities."""
        return math.log(self.pairs)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        half = self.ids // 2
        keys = draw_distinct(generator, np.ones(half - 1), count, self.pairs) + 1
        values = draw_distinct(generator, np.ones(self.ids - half), count, self.pairs) + half
        places = np.arange(1, (length - 2 * self.pairs) // 2 + 1)
        gaps = draw_distinct(generator, places ** (self.gap_power - 1.0), count, self.pairs)
        if self.fill == "zeros":
            fillers = np.zeros((count, length), dtype=np.int64)
        else:
            fillers = generator.integers(self.ids, size=(count, length))
        return arrange_recall(keys, values, gaps, fillers)

    @consistency_check
    def _pairs_fit(self) -> None:
        """Refuse more pairs than there are keys, or than the sequence has room for."""
        most = self.ids // 2 - 1
        if self.pairs > most:
            raise ValueError(f"pairs: {self.pairs} pairs need other keys each; {most} at most")
        if 4 * self.pairs > self.length:
            raise ValueError(
                f"length: {self.pairs} pairs and their queries need {4 * self.pairs} tokens"
            )


def arrange_recall(keys: Ids, values: Ids, gaps: Ids, fillers: Ids) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, n) of `recall`.

    keys, values and gaps: (B, P); query p stands at token 2 P + 2 gaps[:, p]. fillers: (B, n) are
    the tokens of all other places.
    """
    pairs = keys.shape[1]
    tokens = fillers.copy()
    tokens[:, 0 : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = values
    targets = np.full_like(tokens, IGNORED)
    places = 2 * pairs + 2 * gaps
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return tokens, targets


class ContextRecallConfig(Probe, kind="context-recall"):
    """A stream of pairs; from its second time on, a key's value is the target.

    Each key keeps its value within a sequence. The last pair has a key that stood before. With
    `noise_share`, pairs are replaced by two noise tokens. In training every next token is a target,
    as in the source.
    """

    length: PositiveInt = Field(127, description="tokens of a training sequence, an odd number")
    ids: PositiveInt = Field(16, description="token ids, noise included")
    noise_ids: NonNegativeInt = Field(0, description="token ids that are noise")
    noise_share: Share = Field(0.0, description="share of pairs that are noise")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def signal_ids(self) -> int:
        """Number of ids that are keys or values."""
        return self.ids - self.noise_ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing among all values."""
        return 1 / (self.signal_ids - self.signal_ids // 2)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        # The last value is a target only.
        pairs = (length + 1) // 2
        num_keys = self.signal_ids // 2
        num_values = self.signal_ids - num_keys
        table = num_keys + generator.integers(num_values, size=(count, num_keys))
        keys = generator.integers(num_keys, size=(count, pairs))
        is_noise = generator.random((count, pairs)) < self.noise_share
        # At least one pair is no noise.
        certain = generator.integers(pairs, size=count)
        is_noise[np.arange(count), certain] = False
        is_noise[:, -1] = False
        only_last = is_noise[:, :-1].all(axis=1)
        is_noise[only_last, 0] = False
        keys[:, -1] = draw_presented(generator, keys[:, :-1], is_noise[:, :-1], num_keys)
        noise = self.signal_ids + generator.integers(max(self.noise_ids, 1), size=(count, pairs, 2))
        return arrange_context_recall(keys, table, is_noise, noise, is_training)

    @consistency_check
    def _noise_is_possible(self) -> None:
        """Refuse noise without tokens for it, and an odd number of tokens."""
        if self.noise_share > 0 and self.noise_ids == 0:
            raise ValueError("noise_share: needs `noise_ids` above 0")
        if self.signal_ids < 2:
            raise ValueError(f"noise_ids: {self.noise_ids} of {self.ids} ids leave no keys")
        for name, tokens in (("length", self.length), ("longer", self.longer)):
            if tokens is not None and (tokens % 2 == 0 or tokens < 3):
                raise ValueError(
                    f"{name}: pairs without the last value are an odd number of tokens, 3 at least"
                )


class NoisyRecallConfig(ContextRecallConfig, kind="noisy-recall"):
    """`context-recall` with noise between the pairs."""

    ids: PositiveInt = Field(32, description="token ids, noise included")
    noise_ids: NonNegativeInt = Field(16, description="token ids that are noise")
    noise_share: Share = Field(0.2, description="share of pairs that are noise")


def draw_presented(
    generator: np.random.Generator, keys: Ids, is_noise: np.ndarray, num_keys: int
) -> Ids:
    """Draw one of the different keys (B, P) of each sequence that are no noise, (B,)."""
    is_presented = np.zeros((len(keys), num_keys), dtype=bool)
    rows, places = np.nonzero(~is_noise)
    is_presented[rows, keys[rows, places]] = True
    scores = np.where(is_presented, generator.random(is_presented.shape), -1.0)
    return scores.argmax(axis=1)


def arrange_context_recall(
    keys: Ids, table: Ids, is_noise: np.ndarray, noise: Ids, is_training: bool
) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, n) of `context-recall`, where n is 2 P - 1.

    keys: (B, P). table: (B, K), the value of each key. is_noise: (B, P). noise: (B, P, 2), the
    tokens in place of the pairs that are noise. The last value is a target only.
    """
    count, pairs = keys.shape
    values = np.take_along_axis(table, keys, axis=1)
    stream = np.stack([keys, values], axis=2)
    stream = np.where(is_noise[:, :, None], noise, stream).reshape(count, 2 * pairs)
    tokens, next_tokens = stream[:, :-1], stream[:, 1:]
    if is_training:
        return tokens, next_tokens
    stood_before = find_repeats(keys, is_noise)
    targets = np.full_like(tokens, IGNORED)
    # Token 2 p is key p, and the next token is its value.
    targets[:, 0::2] = np.where(stood_before, values, IGNORED)
    return tokens, targets


def find_repeats(keys: Ids, is_noise: np.ndarray) -> np.ndarray:
    """Return True for the keys (B, P) that are no noise and stand further left too."""
    is_signal = ~is_noise
    same = (keys[:, :, None] == keys[:, None, :]) & is_signal[:, :, None] & is_signal[:, None, :]
    earlier = np.tril(np.ones((keys.shape[1],) * 2, dtype=bool), -1)
    return (same & earlier).any(axis=2)


class FuzzyRecallConfig(Probe, kind="fuzzy-recall"):
    """`context-recall` with keys and values of one to three tokens each.

    The last key and value are those of a pair that certainly stood before. Sequences are padded on
    the left. In training every next token is a target; evaluated keys have the largest size.
    """

    largest_key: PositiveInt = Field(3, description="most tokens of a key")
    largest_value: PositiveInt = Field(3, description="most tokens of a value")
    ids: PositiveInt = Field(16, description="token ids, the padding included")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing among all values."""
        signal_ids = self.ids - 1
        return 1 / (signal_ids - signal_ids // 2)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        # The last token is a target only, so one more is drawn.
        tokens = np.full((count, length + 1), self.ids - 1)
        targets = np.full((count, length + 1), self.ids - 1 if is_training else IGNORED)
        for row in range(count):
            stream, recalled = self._draw_stream(generator, length, is_training)
            tokens[row, -len(stream) :] = stream
            targets[row, -len(stream) :] = stream if is_training else recalled
        return tokens[:, :-1], targets[:, 1:]

    def _draw_stream(
        self, generator: np.random.Generator, length: int, is_training: bool
    ) -> tuple[list[int], list[int]]:
        """Return one sequence, and the same with -100 where no value is recalled."""
        num_keys = (self.ids - 1) // 2
        key_ids = list(range(num_keys))
        value_ids = list(range(num_keys, self.ids - 1))
        least_key = 1 if is_training else self.largest_key

        def draw_motif(ids: list[int], least: int, largest: int) -> tuple[int, ...]:
            size = int(generator.integers(least, largest + 1))
            return tuple(int(token) for token in generator.permutation(ids)[:size])

        asked_key = draw_motif(key_ids, least_key, self.largest_key)
        asked_value = draw_motif(value_ids, 1, self.largest_value)
        asked_size = len(asked_key) + len(asked_value)
        largest_pair = self.largest_key + self.largest_value
        most = length - asked_size - largest_pair
        # A later place could be jumped over. The source draws such places too, so that the pair it
        # asks for is missing in a few of its sequences.
        asked_place = int(generator.integers(max(1, most - largest_pair)))
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        table = {asked_key: asked_value}
        tokens = 0
        is_presented = False
        while tokens < most:
            if tokens >= asked_place and not is_presented:
                key = asked_key
            else:
                key = draw_motif(key_ids, least_key, self.largest_key)
            is_presented = is_presented or key == asked_key
            if key not in table:
                table[key] = draw_motif(value_ids, 1, self.largest_value)
            pairs.append((key, table[key]))
            tokens += len(key) + len(table[key])
        pairs.append((asked_key, asked_value))
        return arrange_fuzzy_recall(pairs)

    @consistency_check
    def _motifs_fit(self) -> None:
        """Refuse sizes for which there are too few ids or tokens."""
        num_keys = (self.ids - 1) // 2
        if max(self.largest_key, self.largest_value) > num_keys:
            raise ValueError(f"ids: {self.ids} ids have {num_keys} keys, fewer than a key needs")
        least = 3 * (self.largest_key + self.largest_value)
        if self.length < least:
            raise ValueError(f"length: keys and values of this size need {least} tokens")


def arrange_fuzzy_recall(
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> tuple[list[int], list[int]]:
    """Return the tokens of `pairs`, and the values of keys that stood before, -100 elsewhere."""
    stream: list[int] = []
    recalled: list[int] = []
    known_keys: set[tuple[int, ...]] = set()
    for key, value in pairs:
        stream.extend(key)
        stream.extend(value)
        recalled.extend([IGNORED] * len(key))
        recalled.extend(value if key in known_keys else [IGNORED] * len(value))
        known_keys.add(key)
    return stream, recalled
