"""Rows of Parquet, CSV and JSON files, or of a data set of the Hugging Face hub."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from lit_attn.data.base import find_paths
from lit_attn.data.folders import list_names, list_visible, require_finished
from lit_attn.data.log import LOG
from lit_attn.data.rows import read_csv, read_json
from lit_attn.data.splits import find_split, warn_of_shared_files
from lit_attn.extras import require
from lit_attn.schema import errors
from lit_attn.schema.base import Config, consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.mistakes import first_line


class Table(Config):
    """Rows of `train`, `test` and `val`, which are files, or splits of a data set of the hub.

    Every cell of CSV and JSON is read as written; only an empty cell or a JSON null is missing.
    """

    column_keys: ClassVar[tuple[str, ...]]
    """Keys that name columns."""

    hub: str | None = Field(None, description="data set of the hub, owner/name; null: files")
    subset: str | None = Field(None, description="configuration of the data set of the hub")
    train: Path | None = outside_identity(None, "Parquet, CSV or JSON file of the split train")
    test: Path | None = outside_identity(None, "file of the split test")
    val: Path | None = outside_identity(None, "file of the split val")

    @property
    def files(self) -> dict[str, Path]:
        """File of each split; empty for a data set of the hub."""
        paths = {"train": self.train, "test": self.test, "val": self.val}
        return {split: path for split, path in paths.items() if path is not None}

    def input_paths(self) -> list[Path]:
        """Return the files, the folder of a local `hub`, or the record of its cached revision."""
        paths = [path for _, path in find_paths(self.model_dump())]
        if self.hub is None:
            return paths
        folder = Path(self.hub)
        if folder.is_dir():
            return [*paths, folder]
        from huggingface_hub import constants

        repository = f"datasets--{self.hub.replace('/', '--')}"
        return [*paths, Path(constants.HF_HUB_CACHE, repository, "refs", "main")]

    @property
    def columns(self) -> dict[str, str]:
        """Names of the columns that are read, by the key in `data`."""
        columns = {}
        for key in self.column_keys:
            value = getattr(self, key)
            if isinstance(value, str):
                columns[key] = value
                continue
            for column in value or ():
                columns[f"{key}.{column}"] = column
        return columns

    @consistency_check
    def _has_one_source(self) -> None:
        """Refuse a table without files and hub, or with both."""
        has_all_files = self.train is not None and bool(self.test or self.val)
        if self.hub is None and not has_all_files:
            raise ValueError("train: needs the files `train` and `test` or `val`, or `hub`")
        if self.hub is not None and self.files:
            first_split = next(iter(self.files))
            raise ValueError(f"hub: with the file `{first_split}`; drop one of them")


def load_rows(data: Table) -> dict[str, Any]:
    """Return the rows of each split: a `Rows`, or a `Dataset` of the library `datasets`.

    Raises ConfigError if a split cannot be read, has no such column or does not exist.
    """
    if data.hub is not None:
        splits = _load_hub(data, data.hub)
    else:
        for split, path in data.files.items():
            errors.require(f"data.{split}: {path}: no table ends in", path.suffix, READERS)
        warn_of_shared_files(data.files)
        splits = {}
        for split, path in data.files.items():
            splits[split] = _read_file(data, split, path)
    for split, rows in splits.items():
        table = data.files.get(split, data.hub)
        for key, column in data.columns.items():
            errors.require(f"data.{key}: {table} has no column", column, rows.column_names)
    return splits


def _read_csv(data: Table, path: Path) -> Any:
    return read_csv(path, data.columns.values())


def _read_json(data: Table, path: Path) -> Any:
    return read_json(path)


def _read_parquet(data: Table, path: Path) -> Any:
    library = _import_datasets()
    try:
        return library.load_dataset("parquet", data_files={"train": str(path)})["train"]
    except library.exceptions.DatasetsError as error:
        # The cause says more than the library's own error.
        raise ValueError(str(error.__cause__ or error)) from error


READERS: dict[str, Callable[[Table, Path], Any]] = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
}
"""Function that reads a table, by the ending of its file."""


def _import_datasets() -> Any:
    library = require("datasets", "data.kind", "datasets")
    library.disable_progress_bars()
    return library


def _read_file(data: Table, split: str, path: Path) -> Any:
    """Return the rows of a file; raise ConfigError with the split and the reason."""
    try:
        return READERS[path.suffix](data, path)
    except ConfigError:
        # A library is not installed.
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ConfigError(f"data.{split}: {path} cannot be read: {reason}") from error


def _load_hub(data: Table, hub: str) -> dict[str, Any]:
    """Return the splits train, val and test of a data set of the hub, or of a local folder.

    Raises ConfigError if it cannot be loaded, or has no split to train on or to evaluate.
    """
    library = _import_datasets()
    if Path(hub).is_dir():
        # The library guesses the splits of a folder from the names of its files.
        _check_names(Path(hub))
    try:
        if Path(hub).is_dir():
            builder = library.load_dataset_builder(hub, data.subset)
            _name_files(hub, builder.config.data_files or {})
        loaded = library.load_dataset(hub, data.subset)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = first_line(error.__cause__ or error)
        raise ConfigError(f"data.hub: {hub} cannot be read: {reason}") from error
    splits: dict[str, Any] = {}
    left_out = []
    for name in loaded:
        split = {"validation": "val"}.get(name, name)
        if split in splits:
            raise ConfigError(f"data.hub: {hub} has two splits for {split}: validation and val")
        if split in ("train", "val", "test"):
            splits[split] = loaded[name]
        else:
            left_out.append(name)
    has_evaluated_split = "val" in splits or "test" in splits
    if "train" not in splits or not has_evaluated_split:
        raise ConfigError(
            f"data.hub: {hub} has the splits {', '.join(loaded)}; needed are train, and test or "
            "validation"
        )
    if left_out:
        LOG.warning(
            "data.hub: %s: not read are the splits %s; read are train, validation and test",
            hub,
            ", ".join(left_out),
        )
    return splits


def _name_files(hub: str, files: Mapping[Any, list[str]]) -> None:
    """Warn of every split of a local folder that has several files, and name them."""
    for split, paths in files.items():
        names = [Path(path).name for path in paths]
        if len(names) > 1:
            LOG.warning(
                "data.hub: %s: %s is read from %s: %s",
                hub,
                split,
                plural(len(names), "file"),
                list_names(names),
            )


def _check_names(folder: Path) -> None:
    """Raise ConfigError for a visible file below `folder` that is unfinished or in two splits."""
    for entry in list_visible("data.hub", folder):
        if entry.is_file():
            require_finished("data.hub", Path(entry.path))
            find_split(Path(entry.name).stem, f"data.hub: {entry.path}")
        elif entry.is_dir(follow_symlinks=False):
            _check_names(Path(entry.path))
