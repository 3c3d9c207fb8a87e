"""Classes of a data set: warnings about those without training samples, and the largest class."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_attn.data.log import LOG
from lit_attn.schema.errors import ConfigError, plural

Shares = dict[str, tuple[float, int]]
"""Share of the most frequent class, and the number of labels, by split."""

WHOLE_NUMBER = re.compile(r"(-?[0-9]{1,18})(\.0+)?")
"""A whole number that fits into 64 bits, also as programs write it that store labels as floats."""

MOST_LISTED = 5  # Classes that a warning lists; further ones are counted.


def read_whole_numbers(cells: Iterable[Any]) -> list[int] | None:
    """Return the labels as numbers if each is a whole number; None if one of them is a name.

    A number has the same label as a number, as a float and as a text, in every format of tables.
    Raises ValueError for two texts of one number, such as 01 and 1, which may be two classes.
    """
    numbers: list[int] = []
    spellings: dict[int, str] = {}
    for cell in cells:
        match = WHOLE_NUMBER.fullmatch(str(cell))
        if match is None:
            return None
        number = int(match[1])
        numbers.append(number)
        if isinstance(cell, str):
            first = spellings.setdefault(number, cell)
            if first != cell:
                raise ValueError(
                    f"the labels '{first}' and '{cell}' are one number; write it in one way, or "
                    "give classes names that are no numbers"
                )
    return numbers


def require_all_names(names: Sequence[str], classes: int) -> None:
    """Raise ConfigError unless there are as many names of classes in train as `classes`."""
    if len(names) != classes:
        listed = ", ".join(names[:MOST_LISTED])
        others = len(names) - MOST_LISTED
        more = f" and {others:,} more" if others > 0 else ""
        raise ConfigError(
            f"data.classes: {classes}, but train has {plural(len(names), 'name')} of classes: "
            f"{listed}{more}; set {len(names)}"
        )


def require_used_classes(labels: Mapping[str, NDArray[Any]], classes: int) -> None:
    """Raise ConfigError if the highest of `classes`, numbers from 0 on, has no sample in any split.

    The number of classes is then a mistake, as it is for names and folders. A class in between may
    lack training samples, which is a warning.
    """
    highest = max(int(values.max(initial=0)) for values in labels.values())
    if highest + 1 < classes:
        raise ConfigError(
            f"data.classes: {classes}, but the labels of all splits are 0 to {highest}; set "
            f"{highest + 1}"
        )


def measure_largest_class(labels: Mapping[str, NDArray[Any]]) -> Shares:
    """Return the share of the most frequent class among the labels of each split."""
    shares = {}
    for split, values in labels.items():
        if len(values):
            counts = np.unique(values, return_counts=True)[1]
            shares[split] = (float(counts.max() / len(values)), len(values))
    return shares


def warn_of_missing_labels(labels: Mapping[str, NDArray[Any]], classes: int) -> None:
    """Warn of classes without a sample in train.

    `labels` has the classes, from 0 to `classes` - 1, of the samples of each split. A class that
    only an evaluated split has cannot be learned, so a warning names the split, too.
    """
    trained = set(np.unique(labels["train"]).tolist())
    missing = [label for label in range(classes) if label not in trained]
    if missing:
        LOG.warning(
            "data.classes: %s classes, but no training sample has %s",
            f"{classes:,}",
            _list_labels(missing),
        )
    for split, values in labels.items():
        numbers, counts = np.unique(values, return_counts=True)
        counted = zip(numbers.tolist(), counts.tolist(), strict=True)
        untrained = {label: count for label, count in counted if label not in trained}
        if untrained:
            LOG.warning(
                "data: %s of %s samples of %s have %s, which no training sample has; they count as "
                "errors",
                f"{sum(untrained.values()):,}",
                f"{len(values):,}",
                split,
                _list_labels(list(untrained)),
            )


def _list_labels(labels: list[int]) -> str:
    """Return the first few labels for a message, and the number of the others."""
    listed = ", ".join(str(label) for label in labels[:MOST_LISTED])
    if len(labels) > MOST_LISTED:
        listed += f" and {len(labels) - MOST_LISTED:,} more"
    noun = "label" if len(labels) == 1 else "labels"
    return f"the {noun} {listed}"
