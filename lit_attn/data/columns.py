"""Rows of numbers and categories from tables, and their batches.

Shapes: N rows, F columns of numbers, C columns of categories, K numbers to predict.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from lit_attn.data.base import Data
from lit_attn.data.labels import (
    measure_largest_class,
    read_whole_numbers,
    require_all_names,
    require_used_classes,
    warn_of_missing_labels,
)
from lit_attn.data.loading import start_copy
from lit_attn.data.log import LOG
from lit_attn.data.module import DataModule, EvaluationLoader, numpy_generator
from lit_attn.data.sets import convert_targets, digest, require_classes
from lit_attn.data.tables import Table, load_rows
from lit_attn.floors.base import Floor
from lit_attn.floors.samples import CLASS_RULES, NUMBER_RULES, Samples, class_floors, number_floors
from lit_attn.schema.base import consistency_check
from lit_attn.schema.errors import ConfigError, plural, suggest
from lit_attn.signatures import ColumnLabels, ColumnTargets

Batch = tuple[Tensor, ...]


class Columns(Table, Data):
    """Rows of a table, whose columns are numbers or categories.

    Numbers are standardised by the mean and the deviation of the training rows. The values of a
    category are numbered in alphabetical order. A row with an empty cell is left out.
    """

    name: str = Field(description="name of the data set in identities and tables")
    numbers: tuple[str, ...] = Field((), description="columns of numbers")
    categories: dict[str, PositiveInt] = Field(
        {}, description="columns of categories, with the number of values that train has at most"
    )
    validation: int = Field(
        0, ge=0, description="rows held out of train, always the same ones, if there is no `val`"
    )

    def build(self, seed: int, device: torch.device) -> "ColumnData":
        return ColumnData(self, seed, device)

    @property
    def category_columns(self) -> list[str]:
        """Columns of categories in the order of their tokens.

        Identities do not have the order in which a mapping is written, so it must change nothing.
        """
        return sorted(self.categories)

    @property
    def category_sizes(self) -> tuple[int, ...]:
        """Number of values of each column of `category_columns`."""
        return tuple(self.categories[column] for column in self.category_columns)

    @consistency_check
    def _has_distinct_columns(self) -> None:
        """Refuse a table without columns to read, and a column that is named twice."""
        if not self.numbers and not self.categories:
            raise ValueError("numbers: needs a column in `numbers` or `categories`")
        keys: dict[str, str] = {}
        for key, column in self.columns.items():
            if column in keys.values():
                first = next(name for name, other in keys.items() if other == column)
                raise ValueError(f"{key}: column '{column}' is also named by `{first}`; remove one")
            keys[key] = column


class ColumnClasses(Columns, kind="column-labels"):
    """Rows of numbers and categories with one class each: numbers from 0, or names."""

    column_keys: ClassVar = ("numbers", "categories", "label")
    floor_rules: ClassVar = CLASS_RULES
    label: str = Field("label", description="column of the classes")
    classes: PositiveInt = Field(2, description="number of classes")

    def signature(self) -> ColumnLabels:
        return ColumnLabels(len(self.numbers), self.category_sizes, self.classes)


class ColumnNumbers(Columns, kind="column-targets"):
    """Rows of numbers and categories, and numbers to predict, for the task `regression`."""

    column_keys: ClassVar = ("numbers", "categories", "targets")
    floor_rules: ClassVar = NUMBER_RULES
    targets: tuple[str, ...] = Field(min_length=1, description="columns of the numbers to predict")

    def signature(self) -> ColumnTargets:
        return ColumnTargets(len(self.numbers), self.category_sizes, len(self.targets))


class Rows(NamedTuple):
    """Complete rows of one split: where they come from, their numbers, and the cells by column."""

    source: str
    numbers: list[int]
    cells: dict[str, list[Any]]

    def choose(self, places: list[int]) -> "Rows":
        """Return the rows at some places."""
        numbers = [self.numbers[place] for place in places]
        cells = {}
        for name, column in self.cells.items():
            cells[name] = [column[place] for place in places]
        return Rows(self.source, numbers, cells)

    def place(self, index: int, column: str) -> str:
        """Return the words for a cell in an error."""
        return f"{self.source}: row {self.numbers[index]} of '{column}'"


class ColumnSplit(NamedTuple):
    """Numbers (N, F) float32, categories (N, C) int64, and classes (N,) or targets (N, K)."""

    numbers: NDArray[np.float32]
    categories: NDArray[np.int64]
    targets: NDArray[Any]


class ColumnData(DataModule):
    """Batches of rows. An epoch has every training row once, in an order of its own."""

    def __init__(self, data: Columns, seed: int, device: torch.device) -> None:
        super().__init__(data, seed, device)
        arrays = read_columns(data)
        self.data = data
        # Training rows stay on the CPU, where worker processes can read them.
        self.tensors: dict[str, Batch] = {}
        for split, content in arrays.items():
            place = torch.device("cpu") if split == "train" else device
            self.tensors[split] = tuple(torch.from_numpy(array).to(place) for array in content)
        self.splits = [split for split in ("val", "test") if split in arrays]
        if isinstance(data, ColumnClasses):
            labels = {split: content.targets for split, content in arrays.items()}
            require_used_classes(labels, data.classes)
            warn_of_missing_labels(labels, data.classes)
            self.largest_class = measure_largest_class(labels)
        self.set_epoch(len(arrays["train"].targets), drop_last=True)

    def fingerprint(self) -> str:
        arrays = []
        for split in self.tensors.values():
            arrays += [tensor.cpu().numpy() for tensor in split]
        return digest(arrays)

    def batch(self, step: int) -> Batch:
        chosen = self.share(self.rows(step, self._draw_order))
        return tuple(start_copy(tensor[chosen], self.device) for tensor in self.tensors["train"])

    def floors(self, split: str, steps: int) -> list[Floor]:
        """Return the floors of standardised numbers and of categories, one column a value."""
        train, evaluated = self._features("train"), self._features(split)
        if isinstance(self.data, ColumnClasses):
            return class_floors(train, evaluated)
        return number_floors(train, evaluated)

    def _features(self, split: str) -> Samples:
        """Return the rows of a split with an indicator for each value of each category."""
        numbers, categories, targets = (tensor.cpu().numpy() for tensor in self.tensors[split])
        columns = [numbers]
        for number, name in enumerate(self.data.category_columns):
            values = np.arange(self.data.categories[name] + 1)
            columns.append((categories[:, number, None] == values).astype(np.float32))
        return Samples(np.concatenate(columns, axis=1), targets)

    def _draw_order(self, epoch: int) -> Tensor:
        """Return the order (N,) of the training rows in an epoch."""
        count = len(self.tensors["train"][0])
        return torch.from_numpy(numpy_generator(self.seed, "order", epoch).permutation(count))

    def evaluation_loader(self, split: str) -> EvaluationLoader:
        tensors = self.tensors[split]
        count = len(tensors[0])
        rows = self.share(torch.arange(count))
        units = [part.tolist() for part in rows.split(self.eval_batch_size)]
        batches = units
        if len(rows) == 0:
            # A process without rows evaluates the first one as padding.
            batches = [[0]]
            units = [[count]]

        def load(batches: Any) -> Iterator[Batch]:
            for chosen in batches:
                yield tuple(tensor[chosen] for tensor in tensors)

        return EvaluationLoader(batches, load, units, count)


def read_columns(data: Columns) -> dict[str, ColumnSplit]:
    """Return the splits "train", "test" and perhaps "val"; a single evaluated split is "test".

    Rows with an empty cell are left out and counted in a warning. Raises ConfigError, which names
    the row, for a cell that is no number and for a class that train lacks.
    """
    tables = load_rows(data)
    if "test" not in tables:
        tables["test"] = tables.pop("val")
    rows = {split: _read_complete_rows(data, split, table) for split, table in tables.items()}
    if data.validation and "val" not in rows:
        rows["train"], rows["val"] = _hold_out(data, rows["train"])
    numbers = _read_numbers(data, rows)
    categories = _read_categories(data, rows)
    targets = _read_targets(data, rows)
    return {
        split: ColumnSplit(numbers[split], categories[split], targets[split])
        for split in ("train", "val", "test")
        if split in rows
    }


def _read_complete_rows(data: Columns, split: str, table: Any) -> Rows:
    """Return the rows without an empty cell; warn of the others with their number by column."""
    source = f"data.{split}: {data.files.get(split, data.hub)}"
    cells = {name: list(table[name]) for name in data.columns.values()}
    count = len(next(iter(cells.values())))
    complete = []
    left_out: Counter[str] = Counter()
    for row in range(count):
        empty = [name for name, column in cells.items() if _is_missing(column[row])]
        if empty:
            left_out[empty[0]] += 1
        else:
            complete.append(row)
    if left_out:
        counts = [f"{name} ({number:,})" for name, number in left_out.items()]
        LOG.warning(
            "%s: %s of %s are left out, because a cell is empty: %s",
            source,
            f"{left_out.total():,}",
            plural(count, "row"),
            ", ".join(counts),
        )
    if not complete:
        raise ConfigError(
            f"{source}: no row has all cells; fill the empty ones, or read fewer columns"
        )
    return Rows(source, list(range(count)), cells).choose(complete)


def _is_missing(cell: Any) -> bool:
    """Return True for an empty cell; tables of numbers mark it with NaN."""
    return cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell))


def _hold_out(data: Columns, train: Rows) -> tuple[Rows, Rows]:
    """Return the training rows and `data.validation` rows of them, which are always the same."""
    count = len(train.numbers)
    if data.validation >= count:
        raise ConfigError(
            f"data.validation: {data.validation} of {plural(count, 'row')} leave none"
        )
    order = numpy_generator(0, "validation", 0).permutation(count).tolist()
    held_out = sorted(order[: data.validation])
    return train.choose(sorted(order[data.validation :])), train.choose(held_out)


def _to_numbers(rows: Rows, column: str) -> NDArray[np.float64]:
    """Return the numbers (N,) of a column; ConfigError for a cell that is no finite number."""
    values = []
    for index, cell in enumerate(rows.cells[column]):
        try:
            # Python reads 1_000 as a number, and no other program writes it.
            value = math.nan if "_" in str(cell) else float(cell)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(
                f"{rows.place(index, column)} is {cell!r:.60}, which is no number; correct it, "
                "empty the cell to leave the row out, or read the column in `categories`"
            )
        values.append(value)
    return np.asarray(values)


def _read_numbers(data: Columns, rows: dict[str, Rows]) -> dict[str, NDArray[np.float32]]:
    """Return the numbers (N, F) of each split, standardised by those of train."""
    columns: dict[str, list[NDArray[np.float32]]] = {split: [] for split in rows}
    for name in data.numbers:
        trained = _to_numbers(rows["train"], name)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = trained.mean()
            deviation = trained.std()
        if not math.isfinite(deviation):
            raise ConfigError(f"data.numbers: the values of '{name}' are too large; divide them")
        if deviation == 0:
            LOG.warning("data.numbers: '%s' has one value in all rows of train", name)
            deviation = 1.0
        for split, content in rows.items():
            standardised = (_to_numbers(content, name) - mean) / deviation
            columns[split].append(standardised.astype(np.float32))
    return {split: _stack(rows[split], columns[split], np.float32) for split in rows}


def _read_categories(data: Columns, rows: dict[str, Rows]) -> dict[str, NDArray[np.int64]]:
    """Return the ids (N, C) of the categories of each split; 0 is a value that train lacks."""
    columns: dict[str, list[NDArray[np.int64]]] = {split: [] for split in rows}
    for name in data.category_columns:
        values = sorted({str(cell) for cell in rows["train"].cells[name]})
        if len(values) > data.categories[name]:
            raise ConfigError(
                f"data.categories.{name}: {data.categories[name]}, but train has "
                f"{plural(len(values), 'value')}; set {len(values)}, or read the "
                "column in `numbers`"
            )
        ids = {value: number for number, value in enumerate(values, start=1)}
        for split, content in rows.items():
            numbers = [ids.get(str(cell), 0) for cell in content.cells[name]]
            columns[split].append(np.asarray(numbers, np.int64))
            unknown = numbers.count(0)
            if unknown:
                LOG.warning(
                    "%s: %s of %s have a value of '%s' that train lacks",
                    content.source,
                    f"{unknown:,}",
                    plural(len(numbers), "row"),
                    name,
                )
    return {split: _stack(rows[split], columns[split], np.int64) for split in rows}


def _stack(rows: Rows, columns: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Return columns (N,) side by side; without a column, (N, 0)."""
    if not columns:
        return np.empty((len(rows.numbers), 0), dtype)
    return np.stack(columns, axis=1)


def _read_targets(data: Columns, rows: dict[str, Rows]) -> dict[str, NDArray[Any]]:
    """Return the classes (N,) int64 or the numbers to predict (N, K) float32 of each split."""
    if isinstance(data, ColumnClasses):
        return _read_labels(data, rows)
    names = data.columns
    targets = [column for key, column in names.items() if key.startswith("targets.")]
    result = {}
    for split, content in rows.items():
        numbers = []
        for name in targets:
            where = f"{content.source}: '{name}'"
            numbers.append(convert_targets(where, _to_numbers(content, name)))
        result[split] = np.stack(numbers, axis=1)
    return result


def _read_labels(data: ColumnClasses, rows: dict[str, Rows]) -> dict[str, NDArray[Any]]:
    """Return the classes of each split: whole numbers, or the places of names among train's."""
    all_cells = []
    for content in rows.values():
        all_cells += content.cells[data.label]
    try:
        numbers = read_whole_numbers(all_cells)
    except ValueError as error:
        raise ConfigError(f"data.label: {error}") from error
    labels = {}
    if numbers is not None:
        start = 0
        for split, content in rows.items():
            stop = start + len(content.numbers)
            labels[split] = np.asarray(numbers[start:stop], np.int64)
            start = stop
    else:
        names = sorted({str(cell) for cell in rows["train"].cells[data.label]})
        require_all_names(names, data.classes)
        places = {name: number for number, name in enumerate(names)}
        for split, content in rows.items():
            for index, cell in enumerate(content.cells[data.label]):
                if str(cell) not in places:
                    raise ConfigError(
                        f"{content.place(index, data.label)} is '{cell}', no class of train"
                        f"{suggest(str(cell), names)}"
                    )
            numbers_of_names = [places[str(cell)] for cell in content.cells[data.label]]
            labels[split] = np.asarray(numbers_of_names, np.int64)
    for split, values in labels.items():
        require_classes(split, values, data.classes)
    return labels
