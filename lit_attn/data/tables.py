"""Rows of Parquet, CSV and JSON files and of the hub, read by Hugging Face `datasets`."""

import ast
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_attn.cells.inputs import MAX_FILES
from lit_attn.config.data.tables import LabelledTable, Table, TableImages, TableTargets, TableText
from lit_attn.data.sets import Split, fit_image, make_split, require_classes
from lit_attn.data.text.labelled import Sample
from lit_attn.extras import require
from lit_attn.schema import errors
from lit_attn.schema.errors import ConfigError, suggest

READERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def load_rows(data: Table) -> dict[str, Any]:
    """Return the `datasets.Dataset` of each split; raise ConfigError if one cannot be read."""
    library = require("datasets", "data.kind", "datasets")
    library.disable_progress_bars()
    splits: dict[str, Any] = {}
    where = f"data.hub: {data.hub}"
    for split, path in data.files.items():
        errors.require(f"data.{split}: {path}: no table ends in", path.suffix, READERS)
    try:
        if data.hub is not None:
            loaded = library.load_dataset(data.hub, data.subset)
            splits = {{"validation": "val"}.get(name, name): loaded[name] for name in loaded}
        for split, path in data.files.items():
            where, files = f"data.{split}: {path}", {split: str(path)}
            splits[split] = library.load_dataset(READERS[path.suffix], data_files=files)[split]
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"{where} cannot be read: {reason}") from error
    for split, rows in splits.items():
        for key, column in data.columns.items():
            text = f"data.{key}: {data.files.get(split, data.hub)} has no column"
            errors.require(text, column, rows.column_names)
    if "train" not in splits or not splits.keys() & {"test", "val"}:
        text = "needed are train, and test or validation"
        raise ConfigError(f"data.hub: {data.hub} has the splits {', '.join(splits)}; {text}")
    return splits


def read_images(data: TableImages | TableTargets) -> dict[str, Split]:
    """Return the splits; a single evaluated split is "test"."""
    tables = load_rows(data)
    if "test" not in tables and "val" in tables:
        tables["test"] = tables.pop("val")
    splits: dict[str, Split] = {}
    for split in [name for name in ("train", "val", "test") if name in tables]:
        folder = data.files.get(split, Path()).parent
        images = []
        for row, cell in enumerate(_read_image_cells(tables[split], data.image)):
            where = f"data.{split}: {data.files.get(split, data.hub)}: row {row}"
            source = _find_image(cell, folder, where)
            name = f"{where}: {source}" if isinstance(source, Path) else f"{where}: the image"
            images.append(fit_image(name, source, data))
        splits[split] = make_split(np.stack(images), data.read_labels(tables, split), data)
    return splits


def list_inputs(data: TableImages | TableTargets) -> list[Path]:
    """Return the tables, and the image files that their first rows name."""
    paths = Table.input_paths(data)
    tables = load_rows(data) if data.files else {}
    for split, file in data.files.items():
        first_rows = tables[split].select(range(min(MAX_FILES, len(tables[split]))))
        for row, cell in enumerate(_read_image_cells(first_rows, data.image)):
            source = _find_image(cell, file.parent, f"data.{split}: {file}: row {row}")
            if isinstance(source, Path):
                paths.append(source)
    return paths


def _read_image_cells(rows: Any, column: str) -> Any:
    """Return the cells of a column; images stay encoded, so that one module decodes all of them."""
    features = require("datasets", "data.kind", "datasets")
    if isinstance(rows.features[column], features.Image):
        rows = rows.cast_column(column, features.Image(decode=False))
    return rows[column]


def _find_image(cell: Any, folder: Path, where: str) -> Path | bytes:
    """Return the path of an image or the content of its file.

    A cell has a path, or the bytes and the path that `datasets` stores. Raises ConfigError, which
    begins with `where`, for another cell.
    """
    path = cell
    if isinstance(cell, dict):
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        path = cell.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{where} has no image but {cell!r:.60}; write the path of a file, or delete the row"
        )
    return folder / path


def read_texts(data: TableText) -> dict[str, list[tuple[str, str]]]:
    """Return (name, text) of every document of every split; a single evaluated one is "val"."""
    tables = load_rows(data)
    if "val" not in tables:
        tables["val"] = tables.pop("test")
    return {
        split: [(f"{split} row {i}", str(text)) for i, text in enumerate(rows[data.text]) if text]
        for split, rows in tables.items()
        if split in ("train", "val", "test")
    }


def split_row(data: LabelledTable, text: Any, label: Any) -> tuple[list[str], list[Any]]:
    """Return the texts of a row, which are tokenized one by one, and a class for each.

    Raises ValueError if there is no text, or not one class for each.
    """
    if not data.has_tags:
        if not isinstance(text, str | None):
            raise ValueError(f"'{data.text}' is {text!r}, which is no text")
        return [text or " "], [label]
    words, classes = list_items(text), list_items(label)
    if not words or len(words) != len(classes):
        raise ValueError(f"{len(words)} words and {len(classes)} classes; one class for each")
    if not all(str(word).strip() for word in words):
        raise ValueError("a word is empty")
    numbers = [int(item) if str(item).isdecimal() else item for item in classes]
    return [f" {word}" for word in words], numbers


def list_items(cell: Any) -> list[Any]:
    """Return the items of a list. A text is a list as Python writes it, or words."""
    if isinstance(cell, list):
        return cell
    text = "" if cell is None else str(cell)
    with contextlib.suppress(SyntaxError, ValueError):
        if text.startswith("[") and isinstance(items := ast.literal_eval(text), list):
            return items
    return text.split()


def read_samples(data: LabelledTable) -> dict[str, list[Sample]]:
    """Return the samples of "train", "val" and "test"; each of the last may be both.

    Raises ConfigError for a malformed row and for a class that is not one of `data.classes`.
    """
    rows: dict[str, dict[str, list[Any]]] = {}
    for split, table in load_rows(data).items():
        rows[split] = {data.text: [], data.label: []}
        for row, cells in enumerate(zip(table[data.text], table[data.label], strict=True)):
            try:
                texts, classes = split_row(data, *cells)
            except ValueError as error:
                source = f"data.{split}: {data.files.get(split, data.hub)}"
                raise ConfigError(f"{source}: row {row}: {error}") from error
            rows[split][data.text].append(texts)
            rows[split][data.label].append(classes)
    encode = data.tokenizer.encoder(map(" ".join, rows["train"][data.text]))
    samples: dict[str, list[Sample]] = {}
    for split in [name for name in ("train", "val", "test") if name in rows]:
        labels, samples[split] = read_classes(data, rows, split), []
        require_classes(split, labels, data.classes)
        numbers = iter(labels.tolist())
        for texts in rows[split][data.text]:
            parts = [np.asarray(ids[:-1], np.uint16) for ids in encode.encode(texts)]
            # Id 0 is padding.
            ids = np.concatenate(parts) + np.uint16(1)
            if not data.has_tags:
                samples[split].append(Sample((ids,), next(numbers)))
                continue
            tags = np.zeros_like(ids)
            tags[np.cumsum([0, *map(len, parts[:-1])])] = [next(numbers) + 1 for _ in parts]
            samples[split].append(Sample((ids, tags), 0))
    evaluated = samples.get("val") or samples.get("test") or []
    return {"val": evaluated, "test": evaluated} | samples


def read_classes(
    data: TableImages | LabelledTable, tables: dict[str, Any], split: str
) -> NDArray[np.int64]:
    """Return the classes (N,) of `split`: numbers, or the places of names among those of train.

    A cell has one class or a list of them.
    """
    trained, cells = (
        [
            (row, value)
            for row, cell in enumerate(tables[name][data.label])
            for value in (cell if isinstance(cell, list) else [cell])
        ]
        for name in ("train", split)
    )
    values = [value for _, value in cells]
    if None in values:
        row = cells[values.index(None)][0]
        raise ConfigError(f"data.label: {split} row {row} of '{data.label}' has no class")
    if all(isinstance(value, int) for _, value in trained + cells):
        return np.asarray(values, np.int64)
    names = sorted({str(value) for _, value in trained})
    numbers = {name: number for number, name in enumerate(names)}
    for row, value in cells:
        if str(value) not in numbers:
            text = f"is '{value}', no class of train{suggest(str(value), names)}"
            raise ConfigError(f"data.label: {split} row {row} of '{data.label}' {text}")
    return np.asarray([numbers[str(value)] for value in values], np.int64)


def read_targets(data: TableTargets, tables: dict[str, Any], split: str) -> NDArray[np.float64]:
    """Return the numbers to predict (N, outputs) of `split`."""
    targets = []
    for row, values in enumerate(zip(*(tables[split][c] for c in data.targets), strict=True)):
        try:
            targets.append([float(value) for value in values])
        except (TypeError, ValueError) as error:
            text = f"of {', '.join(data.targets)} has a value that is not a number: {values}"
            raise ConfigError(f"data.targets: {split} row {row} {text}") from error
    return np.asarray(targets)
