"""Probes of search: tokens that have to be looked up far back in a sequence.

Sources: `induction` follows the induction heads of Olsson et al. 2022 (arXiv:2209.11895), with a
gap between the mark and the answer; `needle` is a small form of the test "needle in a haystack",
trained on short sequences and evaluated on longer ones (`longer`); `find-block` is the toy task of
Golovneva et al. 2025, "Multi-Token Attention" (arXiv:2504.00927), in the arrangement of
github.com/facebookresearch/RAM.

Shapes: B sequences, n tokens; K blocks of N letters, and a question of L letters. Ids are int64.
"""

import math

import numpy as np
from probes import IGNORED, Ids, Probe, draw_distinct
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


class FindBlockConfig(Probe, kind="find-block"):
    """Blocks of different letters, then a question of some letters, and the block that has them.

    A sequence is a start token, blocks with separators between them, a mark, the letters of the
    question, and the block that they are drawn from. No other block has all of them. The targets
    are the letters of this block and an end token; each is predicted from the right ones before it.
    """

    length: PositiveInt = Field(320, description="tokens of a training sequence")
    letters: PositiveInt = Field(26, description="ids of letters")
    block: PositiveInt = Field(5, description="letters of a block, all different")
    question: PositiveInt = Field(2, description="letters of the question")

    @property
    def vocabulary(self) -> int:
        # After the letters come the separator, the mark, an id without a use, the start and the
        # end, as in the source.
        return self.letters + 5

    @property
    def floor(self) -> float:
        """Accuracy of the best guess from the question and the letters of the answer so far.

        A letter of the question that has not come yet is the most likely one; the end is certain.
        """
        correct = 1.0
        for place in range(self.block):
            all_came = math.comb(place, self.question) / math.comb(self.block, self.question)
            correct += (1 - all_came) / (self.block - place) + all_came / (self.letters - place)
        return correct / (self.block + 1)

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        answers = draw_distinct(generator, np.ones(self.letters), count, self.block)
        chosen = draw_distinct(generator, np.ones(self.block), count, self.question)
        questions = np.take_along_axis(answers, chosen, axis=1)
        num_blocks = (length - self._size_of_the_rest()) // (self.block + 1)
        blocks = np.empty((count, num_blocks, self.block), dtype=np.int64)
        rows = np.arange(count)
        while len(rows):
            blocks[rows] = self._draw_others(generator, questions[rows], num_blocks)
            # Sequences in which a block stands twice are drawn again.
            rows = rows[has_repeat(blocks[rows])]
        blocks[np.arange(count), generator.integers(num_blocks, size=count)] = answers
        return arrange_blocks(blocks, questions, answers, self.letters)

    def _draw_others(self, generator: np.random.Generator, questions: Ids, num_blocks: int) -> Ids:
        """Draw blocks (B, K, N), none of which has all letters of its question (B, L)."""
        blocks = np.empty((len(questions), num_blocks, self.block), dtype=np.int64)
        is_missing = np.ones(blocks.shape[:2], dtype=bool)
        while is_missing.any():
            size = int(is_missing.sum())
            blocks[is_missing] = draw_distinct(generator, np.ones(self.letters), size, self.block)
            is_asked = blocks[..., None] == questions[:, None, None, :]
            is_missing = is_asked.any(axis=2).all(axis=2)
        return blocks

    def _size_of_the_rest(self) -> int:
        """Return the tokens beside the blocks, of which each has a separator or mark behind it."""
        return 1 + self.question + self.block

    @consistency_check
    def _blocks_fit(self) -> None:
        """Refuse a part of a block, and too few letters for different blocks."""
        if not self.question <= self.block <= self.letters:
            raise ValueError(
                f"block: a question of {self.question} letters needs a block of at least as many, "
                f"and {self.letters} letters have blocks of {self.letters} at most"
            )
        rest, size = self._size_of_the_rest(), self.block + 1
        for name, tokens in (("length", self.length), ("longer", self.longer)):
            if tokens is None:
                continue
            num_blocks, part = divmod(tokens - rest, size)
            if part or num_blocks < 2:
                raise ValueError(
                    f"{name}: whole blocks make {rest + 2 * size} tokens or {size}, {2 * size}, "
                    "... more"
                )
            with_question = math.comb(self.letters - self.question, self.block - self.question)
            without = math.comb(self.letters, self.block) - with_question
            if without * math.factorial(self.block) < num_blocks**2:
                raise ValueError(f"letters: {self.letters} are too few for {num_blocks} blocks")


def has_repeat(blocks: Ids) -> np.ndarray:
    """Return True for each sequence with two equal blocks, (B, K, N) -> (B,)."""
    base = int(blocks.max()) + 1
    numbers = np.sort(blocks @ base ** np.arange(blocks.shape[2]), axis=1)
    return (numbers[:, 1:] == numbers[:, :-1]).any(axis=1)


def arrange_blocks(blocks: Ids, questions: Ids, answers: Ids, letters: int) -> tuple[Ids, Ids]:
    """Return tokens and targets (B, n) of `find-block`.

    blocks: (B, K, N), questions: (B, L), answers: (B, N).
    """
    count, num_blocks, size = blocks.shape
    separator, mark, start, end = letters + np.array([0, 1, 3, 4])
    marks = np.full((count, num_blocks, 1), separator)
    # The mark follows the last block in place of a separator.
    marks[:, -1] = mark
    separated = np.concatenate([blocks, marks], axis=2).reshape(count, -1)
    starts = np.full((count, 1), start)
    tokens = np.concatenate([starts, separated, questions, answers], axis=1)
    targets = np.full_like(tokens, IGNORED)
    targets[:, -size - 1 : -1] = answers
    targets[:, -1] = end
    return tokens, targets
