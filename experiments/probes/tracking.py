"""Probes of state tracking: the state after each token is a product of all tokens so far.

Sources: parity and the symmetric group S5 are the usual pair of tasks; few layers of attention can
compute the first at one length, and a fixed number of layers cannot compute the second at all
lengths (Liu et al. 2023, "Transformers Learn Shortcuts to Automata", arXiv:2210.10749; Merrill et
al. 2024, arXiv:2404.08819).

Shapes: B sequences, n tokens, g elements of a group. Ids are int64.
"""

import math
from functools import cache
from itertools import permutations

import numpy as np
from probes import Ids, Probe
from pydantic import Field, PositiveInt

from lit_attn.schema.base import consistency_check


class ParityConfig(Probe, kind="parity"):
    """Random bits; the target at each token is the parity of the bits up to it."""

    length: PositiveInt = Field(32, description="tokens of a training sequence")

    @property
    def vocabulary(self) -> int:
        return 2

    @property
    def floor(self) -> float:
        """Accuracy of guessing; the parity of the first token is the token itself."""
        return (1 + (self.length - 1) / 2) / self.length

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        bits = generator.integers(2, size=(count, length))
        return bits, bits.cumsum(axis=1) % 2


class PermutationsConfig(Probe, kind="permutations"):
    """Random permutations; the target at each token is the product of those up to it."""

    length: PositiveInt = Field(16, description="tokens of a training sequence")
    elements: PositiveInt = Field(5, description="elements that are permuted; 5: the group S5")

    @property
    def vocabulary(self) -> int:
        return math.factorial(self.elements)

    @property
    def floor(self) -> float:
        """Accuracy of guessing; the product of the first token is the token itself."""
        return (1 + (self.length - 1) / self.vocabulary) / self.length

    def draw(
        self, generator: np.random.Generator, count: int, length: int, is_training: bool
    ) -> tuple[Ids, Ids]:
        table = multiplication_table(self.elements)
        tokens = generator.integers(self.vocabulary, size=(count, length))
        states = np.empty_like(tokens)
        states[:, 0] = tokens[:, 0]
        for place in range(1, length):
            states[:, place] = table[tokens[:, place], states[:, place - 1]]
        return tokens, states

    @consistency_check
    def _has_a_group(self) -> None:
        """Refuse groups without two elements, and those whose table would be large."""
        if not 2 <= self.elements <= 6:
            raise ValueError("elements: 2 to 6")


@cache
def multiplication_table(elements: int) -> Ids:
    """Return the ids (g, g) of the products a b, which apply b first; ids sort the permutations."""
    group = np.array(list(permutations(range(elements))))
    ids = {tuple(permutation): number for number, permutation in enumerate(group.tolist())}
    table = np.empty((len(group), len(group)), dtype=np.int64)
    for number, first in enumerate(group):
        for other, second in enumerate(group):
            table[number, other] = ids[tuple(first[second].tolist())]
    return table
