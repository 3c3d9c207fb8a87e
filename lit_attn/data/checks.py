"""Whether the files are there that a cell will read: looked at without torch, and without reading.

What only reading can find, a torn image or a label in the middle of a text, is found by the cells.
"""

from collections.abc import Iterable
from pathlib import Path

from lit_attn.config.data.base import Data
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.config.data.images import Given
from lit_attn.config.data.labelled import LabelledText, ListOps
from lit_attn.config.data.segmentation import Ade20k
from lit_attn.config.data.text import Gpt2, Shards, TextFiles, Tokens
from lit_attn.config.experiment import Experiment
from lit_attn.config.models.segmenter import SegmenterConfig
from lit_attn.data import sets
from lit_attn.data.text import shards
from lit_attn.schema.errors import ConfigError


def require(experiment: Experiment) -> None:
    """ConfigError that begins with the key of a file or folder that is missing or wrong."""
    data, model = experiment.data, experiment.model
    if isinstance(data, Tokens) and isinstance(data.tokenizer, Gpt2) and data.tokenizer.folder:
        folder = data.tokenizer.folder
        _files("data.tokenizer.folder", [folder / name for name in ("encoder.json", "vocab.bpe")])
    if isinstance(model, SegmenterConfig) and model.checkpoint is not None:
        _files("model.checkpoint", [model.checkpoint])
    try:
        _data(data)
    except ConfigError as error:
        named = str(error).startswith("data.")
        key = "data.path" if isinstance(data, Given) else "data.folder"
        raise ConfigError(str(error) if named else f"{key}: {error}") from error


def require_scenery(root: Path) -> None:
    """ConfigError where `root` is not laid out as ADE20K's own folder."""
    for kind in ("images", "annotations"):
        for split in ("training", "validation"):
            if not (place := root / kind / split).is_dir():
                inside = root / "ADEChallengeData2016"
                meant = f"; did you mean {inside}?" if inside.is_dir() else ""
                raise ConfigError(
                    f"data.root: {place} is not a folder; root is ADE20K's ADEChallengeData2016 "
                    f"(`kind: scenes` needs no download){meant}"
                )


def _data(data: Data) -> None:
    if isinstance(data, Given):
        sets.check_files(data)
    elif isinstance(data, ClassFolders):
        _class_folders(data)
    elif isinstance(data, Ade20k):
        require_scenery(data.root)
    elif isinstance(data, TextFiles):
        for name in ("train", "val", "test"):
            if (path := getattr(data, name)) is not None:
                _files(f"data.{name}", [path])
    elif isinstance(data, Shards):
        shards.streams(data.folder, data.tokenizer.vocabulary)
    elif isinstance(data, LabelledText):
        _files("data.folder", [data.folder / f"{split}.tsv" for split in ("train", "val", "test")])
    elif isinstance(data, ListOps) and data.folder is not None:
        names = [f"basic_{split}.tsv" for split in ("train", "val", "test")]
        _files("data.folder", [data.folder / name for name in names])


def _class_folders(data: ClassFolders) -> None:
    sets.find_split_folders(data.path)
    folders = (data.path / "train").iterdir()
    classes = sum(1 for folder in folders if folder.is_dir() and any(folder.iterdir()))
    if classes != data.classes:
        raise ConfigError(
            f"data.classes: {data.classes}, but {data.path / 'train'} has {classes} folders that "
            "hold something"
        )


def _files(key: str, paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{key}: no file {path}")
