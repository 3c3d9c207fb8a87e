"""Memory of the rows of a stream that were judged: its rules hold only if rows are appended.

The file `ideas.csv.judged.json` beside `ideas.csv` has a hash of each judged row, by the choices
with which it was judged.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lit_attn.files import write_atomic
from lit_attn.judging.prepare import Choices
from lit_attn.report.records.study_record import CellRecord, StudyRecord
from lit_attn.schema.errors import ConfigError, plural

FORMAT = 1


class Recalled(NamedTuple):
    """Sentences about the memory of a stream: what is odd, and what makes its verdicts wrong."""

    notes: list[str]
    warnings: list[str]


def recall_rows(path: Path, study: StudyRecord, choices: Choices) -> Recalled:
    """Compare the runs of a stream with those that were judged before, and remember them.

    Different earlier runs are a warning, also at every later look, and are not remembered. Raises
    ConfigError for a memory that cannot be read.
    """
    path = path.resolve()
    file = path.with_name(f"{path.name}.judged.json")
    memory = _read(file)
    key = _name_choices(study, choices)
    rows = [_hash_row(cell, study.test.is_paired) for cell in study.cells]
    earlier = memory.get(key, [])
    difference = _describe_difference(earlier, rows)
    if difference:
        warning = (
            f"rows that were judged before are different ({difference}), and the verdicts of a"
            " stream hold only if rows are appended. Restore these rows, or begin a new stream with"
            f" fresh runs; {file.name} remembers the old ones"
        )
        return Recalled([], [f"{warning}."])
    if earlier == rows:
        return Recalled([], [])
    memory[key] = rows
    try:
        write_atomic(file, json.dumps({"format": FORMAT, "streams": memory}, indent=1))
    except OSError as error:
        reason = error.strerror or error
        return Recalled([f"These rows are not remembered: {file}: {reason}."], [])
    if earlier:
        return Recalled([], [])
    return Recalled([f"{file.name} remembers the judged rows; keep it beside {path.name}."], [])


def _read(file: Path) -> dict[str, list[str]]:
    """Return the remembered rows by choices. Raises ConfigError for a damaged file."""
    try:
        content = json.loads(file.read_text("utf-8"))
        streams: dict[str, list[str]] = content["streams"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: the rows that were judged before cannot be read; restore this file"
        ) from error
    return streams


def _name_choices(study: StudyRecord, choices: Choices) -> str:
    """Return the choices on which the rows of a stream depend, as one text."""
    metric = study.plan.metric
    parts = [f"{metric.name}:{metric.goal}", study.plan.baseline, study.test.pairs]
    parts += [choices.variant, choices.seed, *choices.where]
    return " | ".join(part for part in parts if part)


def _hash_row(cell: CellRecord, is_paired: bool) -> str:
    """Return a hash of variant, seed and value of a run, and the name of the variant."""
    # The number of an independent run is its place within its variant.
    seed = cell.seed if is_paired else None
    text = json.dumps([cell.variant, seed, cell.value])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {cell.variant}"


def _find_variant(row: str) -> str:
    return row.partition(" ")[2]


def _describe_difference(earlier: Sequence[str], rows: Sequence[str]) -> str:
    """Return how many earlier rows have changed, gone or moved, "" if the rows begin with them."""
    if list(rows[: len(earlier)]) == list(earlier):
        return ""
    missing = Counter(earlier) - Counter(rows)
    missing_by_variant: Counter[str] = Counter()
    for row, count in missing.items():
        missing_by_variant[_find_variant(row)] += count
    lacking = Counter(map(_find_variant, earlier)) - Counter(map(_find_variant, rows))
    gone = sum(min(count, lacking[name]) for name, count in missing_by_variant.items())
    changed = missing.total() - gone
    parts = {"changed": changed, "gone": gone}
    if not missing:
        places = zip(earlier, rows, strict=False)
        parts["moved"] = sum(before != after for before, after in places)
    return ", ".join(f"{plural(count, 'row')} {word}" for word, count in parts.items() if count)
