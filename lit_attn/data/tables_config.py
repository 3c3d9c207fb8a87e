"""Data sets of rows: Parquet, CSV or JSON files, or a data set of the Hugging Face hub."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from lit_attn.data.base import find_paths, method
from lit_attn.data.images_config import OwnClasses, OwnTargets
from lit_attn.data.text.config import Labelled, NamedTokens, TokenizedLabels
from lit_attn.schema.base import Config, consistency_check, outside_identity
from lit_attn.signatures import TaggedTokens


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


class TableImages(Table, OwnClasses, kind="table-images"):
    """Images and their classes: numbers from 0, or names in alphabetical order.

    An image is a cell of `datasets` or the path of a file, relative to the table.
    """

    column_keys: ClassVar = ("image", "label")
    image: str = Field("image", description="column of the images")
    label: str = Field("label", description="column of the classes")
    input_paths: ClassVar = method("lit_attn.data.tables:list_inputs")
    read_splits: ClassVar = method("lit_attn.data.tables:read_images")
    read_labels: ClassVar = method("lit_attn.data.tables:read_classes")


class TableTargets(Table, OwnTargets, kind="table-targets"):
    """Images and numbers to predict, for the task `regression`."""

    column_keys: ClassVar = ("image", "targets")
    image: str = Field("image", description="column of the images")
    targets: tuple[str, ...] = Field(min_length=1, description="columns of the numbers")
    input_paths: ClassVar = method("lit_attn.data.tables:list_inputs")
    read_splits: ClassVar = method("lit_attn.data.tables:read_images")
    read_labels: ClassVar = method("lit_attn.data.tables:read_targets")

    @property
    def num_outputs(self) -> int:
        return len(self.targets)


class TableText(Table, NamedTokens, kind="table-text"):
    """Documents, one in each row, for language modelling."""

    column_keys: ClassVar = ("text",)
    text: str = Field("text", description="column of the documents")
    texts: ClassVar = method("lit_attn.data.tables:read_texts")


class LabelledTable(Table, TokenizedLabels):
    """Texts and classes (numbers or names)."""

    column_keys: ClassVar = ("text", "label")
    text: str = Field("text", description="column of the texts")
    label: str = Field("label", description="column of the classes")
    has_tags: ClassVar[bool] = False
    """True if a row has a list of words, with a class for each, instead of a text."""

    read_samples: ClassVar = method("lit_attn.data.tables:read_samples")


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
    build: ClassVar = method("lit_attn.data.text.labelled:TaggedData")

    def signature(self) -> TaggedTokens:
        return TaggedTokens(self.vocabulary, self.context, self.num_classes)
