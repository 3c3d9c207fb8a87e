"""Images, documents and labelled texts in the rows of tables."""

import ast
import contextlib
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from lit_attn.cells.inputs import MAX_FILES
from lit_attn.data.images import OwnClasses, OwnTargets, fit_image, make_split
from lit_attn.data.labels import read_whole_numbers, require_all_names
from lit_attn.data.log import LOG
from lit_attn.data.rows import Rows
from lit_attn.data.sets import Split, require_classes
from lit_attn.data.tables import Table, load_rows
from lit_attn.data.text.batches import NamedTokens
from lit_attn.data.text.labelled import Labelled, Sample, TaggedData, TokenizedLabels, sample_ids
from lit_attn.data.text.tokenizers import Encoder, encoding
from lit_attn.extras import require
from lit_attn.schema.errors import ConfigError, suggest
from lit_attn.signatures import TaggedTokens


class TableImages(Table, OwnClasses, kind="table-images"):
    """Images and their classes: numbers from 0, or names in alphabetical order.

    An image is a cell of `datasets` or the path of a file, relative to the table.
    """

    column_keys: ClassVar = ("image", "label")
    image: str = Field("image", description="column of the images")
    label: str = Field("label", description="column of the classes")

    def input_paths(self) -> list[Path]:
        return list_inputs(self)

    def read_splits(self) -> dict[str, Split]:
        return read_images(self)

    def read_labels(self, tables: dict[str, Any], split: str) -> NDArray[Any]:
        """Return the classes of the rows of a split."""
        return read_classes(self, tables, split)


class TableTargets(Table, OwnTargets, kind="table-targets"):
    """Images and numbers to predict, for the task `regression`."""

    column_keys: ClassVar = ("image", "targets")
    image: str = Field("image", description="column of the images")
    targets: tuple[str, ...] = Field(min_length=1, description="columns of the numbers")

    def input_paths(self) -> list[Path]:
        return list_inputs(self)

    def read_splits(self) -> dict[str, Split]:
        return read_images(self)

    def read_labels(self, tables: dict[str, Any], split: str) -> NDArray[Any]:
        """Return the numbers to predict of the rows of a split."""
        return read_targets(self, tables, split)

    @property
    def num_outputs(self) -> int:
        return len(self.targets)


def read_images(data: TableImages | TableTargets) -> dict[str, Split]:
    """Return the splits; a single evaluated split is "test"."""
    tables = load_rows(data)
    if "test" not in tables and "val" in tables:
        tables["test"] = tables.pop("val")
    splits: dict[str, Split] = {}
    for split in ("train", "val", "test"):
        if split not in tables:
            continue
        table = data.files.get(split, data.hub)
        folder = data.files.get(split, Path()).parent
        images = []
        for row, cell in enumerate(_read_image_cells(tables[split], data.image)):
            where = f"data.{split}: {table}: row {row}"
            source = _find_image(cell, folder, where, data.image)
            name = f"{where}: {source}" if isinstance(source, Path) else f"{where}: the image"
            images.append(fit_image(name, source, data))
        labels = data.read_labels(tables, split)
        splits[split] = make_split(np.stack(images), labels, data, f"data.{split}: {table}")
    return splits


def list_inputs(data: TableImages | TableTargets) -> list[Path]:
    """Return the tables, and the image files that their first rows name."""
    paths = Table.input_paths(data)
    tables = load_rows(data) if data.files else {}
    for split, file in data.files.items():
        first_cells = islice(_read_image_cells(tables[split], data.image), MAX_FILES)
        for row, cell in enumerate(first_cells):
            where = f"data.{split}: {file}: row {row}"
            source = _find_image(cell, file.parent, where, data.image)
            if isinstance(source, Path):
                paths.append(source)
    return paths


def _read_image_cells(rows: Any, column: str) -> Iterable[Any]:
    """Return the cells of a column. Images stay encoded: one module decodes all of them."""
    if not isinstance(rows, Rows):
        features = require("datasets", "data.kind", "datasets")
        if isinstance(rows.features[column], features.Image):
            rows = rows.cast_column(column, features.Image(decode=False))
    cells: Iterable[Any] = rows[column]
    return cells


def _find_image(cell: Any, folder: Path, where: str, column: str) -> Path | bytes:
    """Return the path of an image or the content of its file.

    A cell has a path, or the bytes and the path that `datasets` stores. Raises ConfigError, which
    begins with `where`, for another cell.
    """
    path = cell
    if isinstance(cell, dict):
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        path = cell.get("path")
    if path is None:
        raise ConfigError(f"{where}: the cell of '{column}' is empty; remove the row")
    if not isinstance(path, str):
        raise ConfigError(
            f"{where}: '{column}' is {cell!r:.60}, no image; write the path of a file"
        )
    return folder / path


class TableText(Table, NamedTokens, kind="table-text"):
    """Documents, one in each row, for language modelling."""

    column_keys: ClassVar = ("text",)
    text: str = Field("text", description="column of the documents")

    def texts(self) -> dict[str, list[tuple[str, str]]]:
        return read_texts(self)


class LabelledTable(Table, TokenizedLabels):
    """Texts and classes (numbers or names)."""

    column_keys: ClassVar = ("text", "label")
    text: str = Field("text", description="column of the texts")
    label: str = Field("label", description="column of the classes")
    has_tags: ClassVar[bool] = False
    """True if a row has a list of words, with a class for each, instead of a text."""

    def read_samples(self) -> dict[str, list[Sample]]:
        return read_samples(self)


class TableLabels(LabelledTable, Labelled, kind="table-labels"):
    """Texts with one class each (a number or a name)."""

    pairs: Literal[False] = Field(False, description="a sample is one text")


class TableTags(LabelledTable, kind="table-tags"):
    """Lists of words and of their classes (numbers or names).

    A cell of CSV is such a list as Python writes it, or words between white space. Each word is
    tokenized by itself, after a space; its class is that of its first token, and no other counts.
    """

    has_tags = True
    text: str = Field("tokens", description="column of the words")
    label: str = Field("tags", description="column of the classes of the words")

    def build(self, seed: int, device: torch.device) -> TaggedData:
        return TaggedData(self, seed, device)

    def signature(self) -> TaggedTokens:
        return TaggedTokens(self.vocabulary, self.context, self.num_classes)


def read_texts(data: TableText) -> dict[str, list[tuple[str, str]]]:
    """Return (name, text) of every document of every split; a single evaluated one is "val".

    Rows without a text are left out and counted in a warning. Raises ConfigError for a cell that is
    no text.
    """
    tables = load_rows(data)
    if "val" not in tables:
        tables["val"] = tables.pop("test")
    documents: dict[str, list[tuple[str, str]]] = {}
    for split, rows in tables.items():
        source = f"data.{split}: {data.files.get(split, data.hub)}"
        texts = list(rows[data.text])
        documents[split] = []
        for number, text in enumerate(texts):
            if text is not None and not isinstance(text, str):
                raise ConfigError(
                    f"{source}: row {number}: '{data.text}' is {text!r}, which is no text"
                )
            if text:
                documents[split].append((f"{split} row {number}", text))
        empty_rows = len(texts) - len(documents[split])
        if empty_rows:
            LOG.warning(
                "%s: %s of %s rows are left out, because the cell of '%s' is empty",
                source,
                f"{empty_rows:,}",
                f"{len(texts):,}",
                data.text,
            )
    return documents


EMPTY_TEXT = " "  # Text of a row with a class and an empty cell: a sample needs a token.


def split_row(data: LabelledTable, text: Any, label: Any) -> tuple[list[str], list[Any]]:
    """Return the texts of a row, which are tokenized one by one, and a class for each.

    Raises ValueError if there is no text, or not one class for each.
    """
    if not data.has_tags:
        if not isinstance(text, str | None):
            raise ValueError(f"'{data.text}' is {text!r}, which is no text")
        return [text or EMPTY_TEXT], [label]
    words, classes = list_items(text), list_items(label)
    if not words or len(words) != len(classes):
        raise ValueError(f"{len(words)} words and {len(classes)} classes; one class for each")
    texts = []
    for word in words:
        if word is None or not str(word).strip():
            raise ValueError("a word is empty")
        texts.append(f" {word}")
    return texts, classes


def list_items(cell: Any) -> list[Any]:
    """Return the items of a list. A text is a list as Python writes it, or words."""
    if isinstance(cell, list):
        return cell
    if cell is None:
        return []
    text = str(cell)
    if text.startswith("["):
        with contextlib.suppress(SyntaxError, ValueError):
            items = ast.literal_eval(text)
            if isinstance(items, list):
                return items
    return text.split()


class LabelledRows(NamedTuple):
    """Texts and classes of the rows of one split; a row of tags has several of each."""

    texts: list[list[str]]
    classes: list[list[Any]]


def read_samples(data: LabelledTable) -> dict[str, list[Sample]]:
    """Return the samples of "train", "test" and, if it exists, "val".

    A single evaluated table is "test". Raises ConfigError for a malformed row and for a class that
    is not one of `data.classes`.
    """
    rows = {}
    for split, table in load_rows(data).items():
        rows[split] = _read_labelled_rows(data, split, table)
    if "test" not in rows:
        rows["test"] = rows.pop("val")
    # A vocabulary of words is learned from the training texts.
    encoder = data.tokenizer.encoder(" ".join(texts) for texts in rows["train"].texts)
    tables = {split: {data.label: split_rows.classes} for split, split_rows in rows.items()}
    samples: dict[str, list[Sample]] = {}
    for split in ("train", "val", "test"):
        if split not in rows:
            continue
        labels = read_classes(data, tables, split)
        require_classes(split, labels, data.classes)
        with encoding(split):
            samples[split] = _make_samples(data, rows[split].texts, labels, encoder)
    return samples


def _read_labelled_rows(data: LabelledTable, split: str, table: Any) -> LabelledRows:
    """Return the texts and classes of every row; warn of empty texts.

    Raises ConfigError, which names the row, for a malformed one.
    """
    source = f"data.{split}: {data.files.get(split, data.hub)}"
    rows = LabelledRows([], [])
    empty_rows = 0
    for number, (text, label) in enumerate(zip(table[data.text], table[data.label], strict=True)):
        try:
            texts, classes = split_row(data, text, label)
        except ValueError as error:
            raise ConfigError(f"{source}: row {number}: {error}") from error
        rows.texts.append(texts)
        rows.classes.append(classes)
        if not data.has_tags and not text:
            empty_rows += 1
    if empty_rows:
        LOG.warning(
            "%s: %s of %s rows have an empty cell '%s', which is read as one space",
            source,
            f"{empty_rows:,}",
            f"{len(rows.texts):,}",
            data.text,
        )
    return rows


def _make_samples(
    data: LabelledTable, rows: list[list[str]], labels: NDArray[np.int64], encoder: Encoder
) -> list[Sample]:
    """Return a sample for each row; `labels` are the classes of all rows, one after another."""
    samples = []
    remaining_labels = iter(labels.tolist())
    for texts in rows:
        parts = [sample_ids(document, encoder) for document in encoder.encode(texts)]
        ids: NDArray[np.unsignedinteger] = np.concatenate(parts)
        if not data.has_tags:
            samples.append(Sample((ids,), next(remaining_labels)))
            continue
        # The first token of a word has the class of the word, plus 1; the others have 0.
        tags = np.zeros_like(ids)
        first_token = 0
        for part in parts:
            tags[first_token] = next(remaining_labels) + 1
            first_token += len(part)
        samples.append(Sample((ids, tags), 0))
    return samples


def read_classes(
    data: TableImages | LabelledTable, tables: dict[str, Any], split: str
) -> NDArray[np.int64]:
    """Return the classes (N,) of `split`: numbers, or the places of names among those of train.

    A cell has one class or a list of them.
    """
    trained = _list_classes(tables["train"][data.label])
    cells = _list_classes(tables[split][data.label])
    for row, value in cells:
        # Tables of numbers mark a missing number with NaN.
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ConfigError(f"data.label: {split} row {row} of '{data.label}' has no class")
    try:
        numbers = read_whole_numbers(value for _, value in cells + trained)
    except ValueError as error:
        raise ConfigError(f"data.label: {error}") from error
    if numbers is not None:
        return np.asarray(numbers[: len(cells)], np.int64)
    names = sorted({str(value) for _, value in trained})
    require_all_names(names, data.classes)
    number_of = {name: number for number, name in enumerate(names)}
    places = []
    for row, value in cells:
        name = str(value)
        if name not in number_of:
            raise ConfigError(
                f"data.label: {split} row {row} of '{data.label}' is '{value}', no class of train"
                f"{suggest(name, names)}"
            )
        places.append(number_of[name])
    return np.asarray(places, np.int64)


def _list_classes(cells: Iterable[Any]) -> list[tuple[int, Any]]:
    """Return the number of the row and the class of every class in a column."""
    classes: list[tuple[int, Any]] = []
    for row, cell in enumerate(cells):
        values = cell if isinstance(cell, list) else [cell]
        classes.extend((row, value) for value in values)
    return classes


def read_targets(data: TableTargets, tables: dict[str, Any], split: str) -> NDArray[np.float64]:
    """Return the numbers to predict (N, outputs) of `split`."""
    targets = []
    columns = [tables[split][column] for column in data.targets]
    for row, values in enumerate(zip(*columns, strict=True)):
        try:
            targets.append([float(value) for value in values])
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"data.targets: {split} row {row} of {', '.join(data.targets)} has a value that "
                f"is not a number: {values}"
            ) from error
    return np.asarray(targets)
