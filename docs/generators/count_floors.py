"""Floors of committed studies: what a rule without attention reaches on the same data.

Text: counts of previous bytes (interpolated, Witten and Bell 1991), taken from the training batches
of seed 0 of the study's baseline and scored on the windows of its test split. Digits: the nearest
neighbour and logistic regression on the pixels of the training images.

    python docs/generators/count_floors.py

writes reports/evidence/floors.csv. The text differs between versions of Python, so the file has the
hash of the data, which must be that of the records.
"""

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.data import sets
from lit_attn.data.sets import Split
from lit_attn.data.text.batches import TextData

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "reports" / "evidence"
TEXTS = ("text", "text-tuned", "text-longer-tuned", "text-mechanisms-tuned", "text-bf16")
DIGITS = ("product", "digits", "mechanisms", "digits-tuned", "mechanisms-tuned")
ORDERS = (2, 3, 4)
"""Numbers of previous bytes."""
BYTES = 256
HEADINGS = ("study", "rule", "value", "data")

Windows = NDArray[np.int64]
"""Bytes (windows, length): the context and, last, the target of the last position."""


class ByteCounts:
    """Counts of the bytes that follow 0, 1, ..., `order` previous bytes of the same window."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.followers: dict[bytes, Counter[int]] = defaultdict(Counter)

    def add(self, windows: Windows) -> None:
        """Count every byte of the windows but the first ones, which are no targets."""
        for window in windows.astype(np.uint8):
            text = window.tobytes()
            for position in range(1, len(text)):
                for length in range(min(self.order, position) + 1):
                    self.followers[text[position - length : position]][text[position]] += 1

    def probability(self, text: bytes, target: int) -> float:
        """Return the probability of `target` after `text`, from the shortest context on."""
        probability = 1 / BYTES
        for length in range(min(self.order, len(text)) + 1):
            followers = self.followers.get(text[len(text) - length :])
            if followers is None:
                break
            total = followers.total()
            kinds = len(followers)
            probability = (followers[target] + kinds * probability) / (total + kinds)
        return probability

    def bits_per_byte(self, windows: Windows) -> float:
        """Return the mean of -log2 of the probability of every target."""
        bits = []
        for window in windows.astype(np.uint8):
            text = window.tobytes()
            for position in range(1, len(text)):
                context = text[max(0, position - self.order) : position]
                bits.append(-math.log2(self.probability(context, text[position])))
        return math.fsum(bits) / len(bits)


def join(batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Windows:
    """Return the inputs of language-model batches, each with its last target."""
    windows = [torch.cat([inputs, targets[:, -1:]], 1) for inputs, targets in batches]
    return torch.cat(windows).numpy()


def measure_text(data: TextData, steps: int, orders: Iterable[int] = ORDERS) -> dict[str, float]:
    """Return bits per byte of each rule, counted on the batches of `steps` training steps."""
    training = join(data.batch(step) for step in range(steps))
    test = join(data.evaluation_loader("test"))
    results = {}
    for order in orders:
        counts = ByteCounts(order)
        counts.add(training)
        results[f"counts of {order} previous bytes"] = counts.bits_per_byte(test)
    return results


def measure_images(splits: dict[str, Split]) -> dict[str, float]:
    """Return the accuracy in % of each rule on the pixels of the test images."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    pixels = {
        name: split.images.reshape(len(split.images), -1) / 255 for name, split in splits.items()
    }
    rules = {
        "nearest neighbour": KNeighborsClassifier(1),
        "logistic regression": LogisticRegression(max_iter=10_000),
    }
    results = {}
    for name, rule in rules.items():
        rule.fit(pixels["train"], splits["train"].labels)
        results[name] = 100 * rule.score(pixels["test"], splits["test"].labels)
    return results


def measure(study: str) -> Iterator[dict[str, str]]:
    """Yield the row of each rule for a committed study."""
    with (EVIDENCE / study / "per_seed.csv").open(encoding="utf-8") as file:
        recorded = next(csv.DictReader(file))
    baseline = expand(read_studies(ROOT / "ablations.yaml")[study], Path("runs")).written[0]
    data = baseline.experiment.data.build(0, torch.device("cpu"))
    if data.fingerprint() != recorded["data"]:
        raise SystemExit(f"{study}: this Python's text is not that of the records")
    if isinstance(data, TextData):
        values = measure_text(data, int(recorded["steps"]))
    else:
        values = measure_images(sets.load(baseline.experiment.data))
    for rule, value in values.items():
        texts = (study, rule, f"{value:.6g}", recorded["data"])
        yield dict(zip(HEADINGS, texts, strict=True))


def main() -> None:
    """Write the floors of all studies."""
    rows = [row for study in (*TEXTS, *DIGITS) for row in measure(study)]
    with (EVIDENCE / "floors.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADINGS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
