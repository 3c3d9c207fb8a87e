"""Splits of a data set in memory: held-out samples, digests, and the range of classes.

Shapes: images (N, C, H, W) uint8, labels (N,) int64.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_attn.schema.errors import ConfigError

SPLIT_SEED = 0  # Seed of the splits of all cells: seeds vary the training, not the data.


class Split(NamedTuple):
    """Images with their labels (N,) int64, or with targets (N, outputs) float32."""

    images: NDArray[np.uint8]
    labels: NDArray[Any]


def digest(parts: Iterable[bytes | str | NDArray[np.generic]]) -> str:
    """Return twelve hexadecimal digits of SHA-256 over bytes, text and arrays."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
        elif isinstance(part, np.ndarray):
            total.update(np.ascontiguousarray(part).data)
        else:
            total.update(part)
    return total.hexdigest()[:12]


def hold_out(count: int, has_val: bool, labels: NDArray[Any]) -> dict[str, NDArray[np.int64]]:
    """Return the training rows of "val" and "train" if `count` is positive, else nothing."""
    if not count:
        return {}
    if has_val:
        raise ConfigError(
            "data.validation: this data set has a validation split already; set it to 0"
        )
    chosen, rest = stratified(labels, count)
    return {"val": chosen, "train": rest}


def stratified(labels: NDArray[Any], count: int) -> tuple[NDArray[np.int64], ...]:
    """Return the indices of `count` samples, any classes in proportion, and those of the rest.

    The result is a function of the arguments. Raises ConfigError if one of the parts would be empty
    or miss a class.
    """
    from sklearn.model_selection import train_test_split

    strata = labels if labels.dtype.kind == "i" else None
    _require_parts(len(labels), count, strata)
    rest, chosen = train_test_split(
        np.arange(len(labels)), test_size=count, stratify=strata, random_state=SPLIT_SEED
    )
    return np.sort(chosen), np.sort(rest)


def _require_parts(samples: int, count: int, strata: NDArray[Any] | None) -> None:
    """Raise ConfigError unless `count` of the samples and the rest have every class."""
    fewest = 1
    if strata is not None:
        classes, sizes = np.unique(strata, return_counts=True)
        if sizes.min() < 2:
            alone = classes[sizes.argmin()]
            raise ConfigError(
                f"data.validation: class {alone} has one training sample, and both parts of the"
                " split need one; add samples of it, or set data.validation to 0"
            )
        fewest = len(classes)
    most = samples - fewest
    if not fewest <= count <= most:
        limit = f"at most {most}" if count > most else f"at least {fewest}"
        raise ConfigError(
            f"data.validation: {count} of {samples} training samples; {limit}, so that both parts"
            " have every class"
        )


def fingerprint(splits: dict[str, Split]) -> str:
    """Return a digest of all arrays with their names."""
    parts: list[str | NDArray[Any]] = []
    for name in sorted(splits):
        for array in splits[name]:
            parts.append(f"{name} {array.dtype} {array.shape}")
            parts.append(array)
    return digest(parts)


def convert_targets(where: str, targets: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers to predict (N, ...) as float32, in which networks train.

    Raises ConfigError, which begins with `where`, if that changes a number by more than a
    thousandth of the standard deviation of its column.
    """
    exact = targets.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = exact.astype(np.float32)
        changes = np.abs(converted - exact).max(0)
        deviations = exact.std(0)
    is_changed = (changes > deviations / 1000) & (deviations > 0)
    if is_changed.any():
        column = int(np.argmax(is_changed)) if is_changed.ndim else ()
        mean = exact.mean(0)[column]
        raise ConfigError(
            f"{where}: float32 changes targets of mean {mean:.10g} and standard deviation"
            f" {deviations[column]:.3g} by up to {changes[column]:.3g}; subtract the mean from"
            " them, or divide them"
        )
    return converted


def require_classes(split: str, labels: NDArray[Any], classes: int) -> None:
    """Raise ConfigError if the labels of `split` are not all from 0 to `classes` - 1."""
    low, high = labels.min(), labels.max()
    if 0 <= low <= high < classes:
        return
    remedy = "labels start at 0"
    if low >= 0:
        remedy = f"set {high + 1}"
    if low > 0:
        remedy = f"subtract {low} from them, or {remedy}"
    raise ConfigError(
        f"data.classes: {classes}, but {split} has the labels {low} to {high}; {remedy}"
    )
