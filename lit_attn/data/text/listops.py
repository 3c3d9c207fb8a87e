"""ListOps (Nangia & Bowman 2018, arXiv:1804.06028) at the lengths of the Long Range Arena.

The arena is Tay et al. 2021 (arXiv:2011.04006); github.com/google-research/long-range-arena.

An expression like `[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]` has the value 5, its class.
MED is the median rounded down, SM the sum modulo 10.
"""

import random
import statistics
from collections.abc import Callable, Iterator

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

# Share of the arguments that are expressions and not digits, as in both generators.
NESTED = 0.25


class TooLong(Exception):
    """Signal that an expression grew past the limit; it is discarded."""


def evaluate(ids: list[int]) -> int:
    """Return the value of an expression; raise ValueError if `ids` are not one expression."""
    stack: list[list[int]] = [[]]
    operations: list[int] = []
    for number in ids:
        if number in OPERATIONS:
            operations.append(number)
            stack.append([])
        elif number == END:
            if not operations or not stack[-1]:
                raise ValueError("']' without an operation or its arguments")
            value = OPERATIONS[operations.pop()](stack.pop())
            stack[-1].append(value)
        elif 0 < number <= 10:
            stack[-1].append(number - 1)
        else:
            raise ValueError(f"{number} is not a token of an expression")
    if operations or len(stack[0]) != 1:
        raise ValueError("not one complete expression")
    return stack[0][0]


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
    seen: set[tuple[int, ...]] = set()
    while True:
        ids: list[int] = []
        try:
            value = _grow(drawn, ids, 1, depth, arguments, lengths[1])
        except TooLong:
            continue
        if len(ids) >= lengths[0] and tuple(ids) not in seen:
            seen.add(tuple(ids))
            yield ids, value


def _grow(
    drawn: random.Random, ids: list[int], level: int, depth: int, arguments: int, limit: int
) -> int:
    """Append an expression of `level` to `ids` and return its value."""
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
        raise TooLong
    return OPERATIONS[operation](values)
