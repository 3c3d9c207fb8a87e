"""Probes of search: a token that has to be looked up far back in a sequence.

Sources: `induction` follows the induction heads of Olsson et al. 2022 (arXiv:2209.11895), with a
gap between the mark and the answer; `needle` is a small form of the test "needle in a haystack",
trained on short sequences and evaluated on longer ones (`longer`).

Shapes: B sequences, n tokens. Ids are int64.
"""

import numpy as np
from probes import IGNORED, Ids, Probe
from pydantic import Field, NonNegativeInt, PositiveInt

from lit_attn.schema.base import consistency_check


class InductionConfig(Probe, kind="induction"):
    """Random tokens with one mark, which comes again near the end.

    The answer stands `gap` tokens after the token behind the first mark. The target at the last
    token, `gap` tokens behind the second mark, is this answer.
    """

    ids: PositiveInt = Field(16, description="token ids, the mark included")
    gap: NonNegativeInt = Field(0, description="tokens between a mark and its answer")

    @property
    def vocabulary(self) -> int:
        return self.ids

    @property
    def floor(self) -> float:
        """Accuracy of guessing one of the tokens."""
        return 1 / (self.ids - 1)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        tokens = generator.integers(self.ids - 1, size=(count, length))
        rows = np.arange(count)
        second_mark = length - 1 - self.gap
        # The answer stands before the second mark.
        first_marks = generator.integers(second_mark - 1 - self.gap, size=count)
        tokens[rows, first_marks] = self.ids - 1
        tokens[:, second_mark] = self.ids - 1
        targets = np.full_like(tokens, IGNORED)
        targets[:, -1] = tokens[rows, first_marks + 1 + self.gap]
        return tokens, targets

    @consistency_check
    def _gaps_fit(self) -> None:
        """Refuse a sequence without room for two marks with their gaps."""
        least = 2 * self.gap + 3
        if self.length < least:
            raise ValueError(f"length: a gap of {self.gap} needs {least} tokens at least")
        if self.ids < 3:
            raise ValueError("ids: the mark and two tokens are 3 ids at least")


class NeedleConfig(Probe, kind="needle"):
    """A key and its value hidden at a random place among other tokens; the key ends the sequence.

    Hay is drawn from ids that are no keys and no values. The target at the last token is the value.
    """

    keys: PositiveInt = Field(8, description="ids of keys")
    values: PositiveInt = Field(8, description="ids of values")
    hay: PositiveInt = Field(16, description="ids of the other tokens")

    @property
    def vocabulary(self) -> int:
        return self.keys + self.values + self.hay

    @property
    def floor(self) -> float:
        """Accuracy of guessing one of the values."""
        return 1 / self.values

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        rows = np.arange(count)
        tokens = self.keys + self.values + generator.integers(self.hay, size=(count, length))
        keys = generator.integers(self.keys, size=count)
        values = self.keys + generator.integers(self.values, size=count)
        places = generator.integers(length - 2, size=count)
        tokens[rows, places] = keys
        tokens[rows, places + 1] = values
        tokens[:, -1] = keys
        targets = np.full_like(tokens, IGNORED)
        targets[:, -1] = values
        return tokens, targets

    @consistency_check
    def _has_room(self) -> None:
        """Refuse a sequence that is shorter than a key, its value and the question."""
        if self.length < 3:
            raise ValueError("length: a key, its value and the question are 3 tokens at least")


class OverwrittenNeedleConfig(NeedleConfig, kind="overwritten-needle"):
    """A key that stands several times among other tokens, each time with another value.

    The last value counts, so the order of the values has to be known as well as the key.
    """

    writes: PositiveInt = Field(4, description="times that the key stands before the question")

    @property
    def floor(self) -> float:
        """Accuracy of guessing one of the written values."""
        return 1 / self.writes

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        rows = np.arange(count)[:, None]
        tokens = self.keys + self.values + generator.integers(self.hay, size=(count, length))
        keys = generator.integers(self.keys, size=(count, 1))
        # Each write takes one of the places of two tokens before the question.
        all_places = np.tile(np.arange((length - 1) // 2), (count, 1))
        places = generator.permuted(all_places, axis=1)[:, : self.writes]
        places = 2 * np.sort(places, axis=1)
        all_values = np.tile(np.arange(self.values), (count, 1))
        values = self.keys + generator.permuted(all_values, axis=1)[:, : self.writes]
        tokens[rows, places] = keys
        tokens[rows, places + 1] = values
        tokens[:, -1:] = keys
        targets = np.full_like(tokens, IGNORED)
        targets[:, -1] = values[:, -1]
        return tokens, targets

    @consistency_check
    def _writes_fit(self) -> None:
        """Refuse more writes than there are places or values."""
        places = (self.length - 1) // 2
        if self.writes > places:
            raise ValueError(f"writes: {self.length} tokens have room for {places} at most")
        if self.writes > self.values:
            raise ValueError(f"writes: {self.values} values are written at most once each")
