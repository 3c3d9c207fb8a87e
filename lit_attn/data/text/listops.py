"""Expressions of ListOps with their values: the arena's files, and a generator of new ones.

An expression like `[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]` has the value 5, its class. MED is
the median rounded down, SM the sum modulo 10.

Sources: Nangia & Bowman 2018, arXiv:1804.06028; Tay et al. 2021, arXiv:2011.04006
(github.com/google-research/long-range-arena; docs/setups.md, section 9).
"""

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from lit_attn.data.base import require_path
from lit_attn.data.kept import Arrays, keep_arrays
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.text.ids import SPLITS
from lit_attn.data.text.labelled import Labelled, Sample
from lit_attn.data.text.streams import read_text
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError

VERSION = 1  # Raise it if the generator changes, so that kept expressions are drawn anew.
GENERATOR_SEED = 0  # Seed of the data of all cells: seeds vary the training, not the data.

# Id 0 is padding.
TOKENS = ("", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
IDS = {token: number for number, token in enumerate(TOKENS)}
END = IDS["]"]

OPERATIONS: dict[int, Callable[[list[int]], int]] = {
    IDS["[MIN"]: min,
    IDS["[MAX"]: max,
    IDS["[MED"]: lambda values: int(statistics.median(values)),
    IDS["[SM"]: lambda values: sum(values) % 10,
}

NESTED = 0.25  # Share of the arguments that are expressions, as in both generators.


class ListOps(Labelled, kind="listops"):
    """ListOps: nested operations on digits in ten classes, as in the Long Range Arena.

    The samples are generated on first use, which takes some minutes, and kept in a file below
    `root`. They are equal for all seeds. Both limits of `lengths` occur; the arena leaves them out.
    With `folder` the samples are read from the arena's basic_train.tsv, basic_val.tsv and
    basic_test.tsv.
    """

    context: PositiveInt = Field(
        2000, description="tokens of a sequence; longer ones are cut, shorter ones padded with id 0"
    )
    vocabulary: PositiveInt = Field(32, ge=16, description="number of embeddings of the model")
    pairs: Literal[False] = Field(False, description="a sample is one sequence")
    lengths: tuple[PositiveInt, PositiveInt] = Field(
        (500, 2000), description="least and greatest number of tokens of an expression"
    )
    depth: PositiveInt = Field(10, ge=2, description="levels of a tree; the last contains digits")
    arguments: PositiveInt = Field(10, ge=2, description="most arguments of an operation")
    train: PositiveInt = Field(96_000, description="training expressions")
    val: PositiveInt = Field(2000, description="validation expressions")
    test: PositiveInt = Field(2000, description="test expressions")
    root: Path = outside_identity(
        Path("data/listops"), "folder to which generated expressions are written"
    )
    folder: Path | None = outside_identity(None, "folder of basic_*.tsv; null: generated data")
    num_classes: ClassVar = 10

    def read_samples(self) -> dict[str, list[Sample]]:
        return read_listops(self)

    def input_paths(self) -> list[Path]:
        """Return the folder of the arena's files; generated expressions follow from the keys."""
        return [] if self.folder is None else [self.folder]

    def check_files(self) -> None:
        super().check_files()
        if self.folder is not None:
            for split in SPLITS:
                require_path("data.folder", self.folder / f"basic_{split}.tsv")

    @consistency_check
    def _has_a_batch(self) -> None:
        """Refuse a batch that is larger than the training expressions of an epoch."""
        if self.folder is None:
            self.require_a_batch(self.train)

    @consistency_check
    def _lengths_are_likely(self) -> None:
        """Refuse lengths that random trees almost never have."""
        shortest, longest = self.lengths
        if shortest > longest:
            raise ValueError(f"lengths: {shortest} is more than {longest}")
        # A full tree has arguments^(depth - 1) digits. Trees of a fifth of that are rare, but they
        # are found in reasonable time.
        largest = self.arguments ** (self.depth - 1)
        if shortest > largest // 5:
            raise ValueError(
                f"lengths: trees of depth {self.depth} with {self.arguments} arguments almost"
                f" never reach {shortest} tokens"
            )


def read_listops(data: ListOps) -> dict[str, list[Sample]]:
    """Return the samples of every split; raise ConfigError naming a malformed file and line."""
    if data.folder is not None:
        paths = {split: data.folder / f"basic_{split}.tsv" for split in SPLITS}
        warn_of_shared_files(paths, "data.folder")
        return {split: _read_file(path) for split, path in paths.items()}
    drawn = _read_drawn(data)
    # The splits follow one another in one sequence of distinct expressions.
    expressions = np.split(drawn["ids"].astype(np.uint16), np.cumsum(drawn["lengths"])[:-1])
    samples = iter(zip(expressions, drawn["values"].tolist(), strict=True))
    splits: dict[str, list[Sample]] = {}
    for split in SPLITS:
        splits[split] = []
        for ids, value in islice(samples, getattr(data, split)):
            splits[split].append(Sample((ids,), value))
    return splits


def _read_drawn(data: ListOps) -> Arrays:
    """Return ids, lengths and values of the expressions, which the first cell draws."""
    count = sum(getattr(data, split) for split in SPLITS)
    recipe = [VERSION, GENERATOR_SEED, data.lengths, data.depth, data.arguments, count]
    return keep_arrays(data.root, "listops", recipe, lambda: _draw(data, count))


def _draw(data: ListOps, count: int) -> Arrays:
    """Return `count` expressions: all ids, and length and value of each one."""
    ids: list[NDArray[np.uint8]] = []
    values: list[int] = []
    expressions = generate(GENERATOR_SEED, data.lengths, data.depth, data.arguments)
    for expression, value in islice(expressions, count):
        ids.append(np.asarray(expression, np.uint8))
        values.append(value)
    lengths = np.asarray([len(expression) for expression in ids], np.int64)
    return {
        "ids": np.concatenate(ids),
        "lengths": lengths,
        "values": np.asarray(values, np.uint8),
    }


def _read_file(path: Path) -> list[Sample]:
    """Read a file of the arena: a heading, then lines `expression<TAB>value`."""
    samples = []
    for number, line in enumerate(read_text(path).splitlines()[1:], start=2):
        expression, _, value = line.partition("\t")
        try:
            ids = parse(expression)
            if evaluate(ids) != int(value):
                raise ValueError(f"the value is {evaluate(ids)}, not {value}")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        samples.append(Sample((np.asarray(ids, dtype=np.uint16),), int(value)))
    if not samples:
        raise ConfigError(f"{path}: has no samples")
    return samples


def evaluate(ids: list[int]) -> int:
    """Return the value of an expression; raise ValueError if `ids` are not one expression."""
    stack: list[int] = []
    for number in ids:
        if number != END:
            stack.append(number)
            continue
        digits = []
        while stack and stack[-1] not in OPERATIONS:
            digits.append(stack.pop() - 1)
        if not stack or not digits:
            raise ValueError("']' without an operation or its arguments")
        stack.append(1 + OPERATIONS[stack.pop()](digits))
    if len(stack) != 1 or stack[0] in OPERATIONS:
        raise ValueError("not one complete expression")
    return stack[0] - 1


def parse(text: str) -> list[int]:
    """Return the ids of an expression, without the parentheses that the data sets write."""
    ids = [IDS.get(token, -1) for token in text.split() if token not in ("(", ")")]
    if not ids or min(ids) < 1:
        raise ValueError(f"not a ListOps expression: {text[:60]}")
    return ids


def generate(
    seed: int, lengths: tuple[int, int], depth: int, arguments: int
) -> Iterator[tuple[list[int], int]]:
    """Yield distinct expressions (ids, value) of `lengths` tokens, both limits included, forever.

    Trees have at most `depth` levels, of which digits are the last, and operations have 2 to
    `arguments` arguments. The same seed gives the same expressions.
    """
    drawn = random.Random(seed)
    yielded: set[tuple[int, ...]] = set()
    while True:
        ids: list[int] = []
        try:
            value = _grow(drawn, ids, 1, depth, arguments, lengths[1])
        except OverflowError:
            continue
        if len(ids) >= lengths[0] and tuple(ids) not in yielded:
            yielded.add(tuple(ids))
            yield ids, value


def _grow(
    drawn: random.Random, ids: list[int], level: int, depth: int, arguments: int, limit: int
) -> int:
    """Append an expression of `level` to `ids` and return its value; raise if it is too long."""
    if level >= depth or drawn.random() > NESTED:
        digit = int(drawn.random() * 10)
        ids.append(1 + digit)
        return digit
    operation = 11 + int(drawn.random() * 4)
    ids.append(operation)
    count = 2 + int(drawn.random() * (arguments - 1))
    values = [_grow(drawn, ids, level + 1, depth, arguments, limit) for _ in range(count)]
    ids.append(END)
    if len(ids) > limit:
        raise OverflowError
    return OPERATIONS[operation](values)
