"""Samples of lm-evaluation-harness (`--log_samples`): one row for each model and item.

The runs of a model are its answers to the items, so `--pairs seed` pairs models over items.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lit_attn.judging.run_table import Row, RunTable, read_entries
from lit_attn.schema.errors import ConfigError, plural

SAMPLES = "samples_*.jsonl"
NAME = re.compile(r"samples_(?P<task>.+?)(?:_(?P<time>\d{4}-\d\d-\d\dT[\d.:-]+))?\.jsonl")
"""Name of a file of samples: task and time."""


def is_folder(path: Path) -> bool:
    """Return True for a folder with files of samples at any depth."""
    return next(path.rglob(SAMPLES), None) is not None


def read_folder(path: Path) -> RunTable:
    """Return the samples of all models below a folder."""
    return read_files(path, sorted(path.rglob(SAMPLES)))


def is_sample(entry: dict[str, Any]) -> bool:
    """Return True for a line of a file of samples."""
    return {"doc_id", "target", "resps"} <= entry.keys()


def read_files(path: Path, files: list[Path]) -> RunTable:
    """Return the samples of files: the model is the folder of a file, the seed is the item.

    Of two files with one model and task the newer one, by the time in its name, replaces the older.
    Raises ConfigError for two of one time or without a time.
    """
    named = []
    for file in files:
        match = NAME.fullmatch(file.name)
        task = match["task"] if match else file.stem
        time = (match["time"] if match else None) or ""
        named.append((time, file, file.parent.resolve().name, task))
    latest: dict[tuple[str, str], Path] = {}
    times: dict[tuple[str, str], str] = {}
    notes = []
    # The folders of models can have any order.
    for time, file, model, task in sorted(named):
        older = latest.get((model, task))
        if older is not None:
            if times[model, task] == time:
                raise ConfigError(
                    f"{file}: has the model '{model}' and the task '{task}' of {older}, and no"
                    " later time in its name; rename the folder of one model"
                )
            notes.append(f"{older} is left out, because {file} is newer.")
        latest[model, task] = file
        times[model, task] = time
    rows: list[Row] = []
    places = []
    metrics: dict[str, None] = {}
    items = _Items()
    for (model, task), file in sorted(latest.items(), key=lambda entry: entry[1]):
        for place, entry in read_entries(file):
            if "doc_id" not in entry:
                raise ConfigError(f"{place}: has no doc_id, as samples of lm-evaluation-harness do")
            row: Row = {"model": model, "task": task}
            row["filter"] = entry.get("filter", "none")
            row["item"] = items.number(model, task, entry)
            for name in _name_metrics(entry):
                row[name] = entry[name]
                metrics[name] = None
            rows.append(row)
            places.append(place)
    notes += items.describe_prompts()
    return RunTable(
        str(path),
        rows,
        places,
        metrics=list(metrics),
        variant="model",
        seed="item",
        parts=("task", "filter"),
        notes=notes,
    )


class _Items:
    """Numbers of the items that all models answered.

    An item is known by the hash of its document, or by the document itself: `doc_id` is a place in
    a list, which another model can have in another order.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int], int] = {}
        self._repeats: Counter[tuple[str, str, str, str]] = Counter()
        self._prompts: dict[int, set[str]] = {}

    def number(self, model: str, task: str, entry: dict[str, Any]) -> int:
        """Return the number of the item of a sample; equal documents of a model are different."""
        identity = str(entry.get("doc_hash") or "")
        if not identity:
            identity = json.dumps(entry.get("doc", entry["doc_id"]), sort_keys=True)
        place = (model, task, str(entry.get("filter", "none")), identity)
        self._repeats[place] += 1
        key = (task, identity, self._repeats[place])
        number = self._numbers.setdefault(key, len(self._numbers))
        if "prompt_hash" in entry:
            self._prompts.setdefault(number, set()).add(str(entry["prompt_hash"]))
        return number

    def describe_prompts(self) -> list[str]:
        """Return a sentence if models have answered different prompts of one item."""
        different = sum(len(hashes) > 1 for hashes in self._prompts.values())
        if not different:
            return []
        return [
            f"The prompts of {plural(different, 'item')} differ between models (prompt_hash): other"
            " examples or another template are a part of the difference."
        ]


def _name_metrics(entry: dict[str, Any]) -> list[str]:
    """Return the metrics of a sample that are one number."""
    named = entry.get("metrics") or [
        name for name in entry if name not in ("doc_id", "doc", "arguments", "target")
    ]
    numbers = []
    for name in named:
        value = entry.get(name)
        if isinstance(value, int | float):
            numbers.append(name)
    return numbers
