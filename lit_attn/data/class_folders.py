"""Files in folders of classes: path/SPLIT/CLASS/*, at any depth below CLASS.

The class of a file is the first folder below its split. Classes are numbered in the natural order
of the folders of train.
"""

import unicodedata
from pathlib import Path
from typing import NamedTuple

from lit_attn.data.folders import FolderReader, list_names, natural_order, require_splits
from lit_attn.data.log import LOG
from lit_attn.data.pictures import ENDINGS
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.schema.errors import ConfigError, plural, suggest


class FileKind(NamedTuple):
    """Word for the files that are read, and the endings of their names."""

    noun: str
    endings: frozenset[str]

    @property
    def listed_endings(self) -> str:
        """The endings in words."""
        return ", ".join(sorted(self.endings))


IMAGES = FileKind("image", frozenset(ENDINGS))
TEXTS = FileKind("text", frozenset({".txt"}))


class ClassTree(NamedTuple):
    """Folder of one split, and the files of each class by the name of its folder."""

    folder: Path
    files: dict[str, list[Path]]


def read_class_folders(path: Path, classes: int, kind: FileKind = IMAGES) -> dict[str, ClassTree]:
    """Return the files of "train", "test" and, if it exists, "val", in folders below `path`.

    Classes are in the order of their numbers. Raises ConfigError for files that cannot be read and
    for folders of another number of classes than `classes`. Warns about files that are left out,
    and about classes that an evaluated split lacks.
    """
    reader = FolderReader("data.path", kind.endings)
    trees: dict[str, ClassTree] = {}
    for split in ("train", "test", "val"):
        folder = path / split
        if not folder.is_dir():
            continue
        files = _read_split(reader, folder, kind)
        # ImageNet's folder test has images without classes, since their labels are secret.
        if files:
            trees[split] = ClassTree(folder, files)
    trees = require_splits(trees, path, "class folders")
    warn_of_shared_files({split: tree.folder for split, tree in trees.items()}, "data.path")
    _require_distinct_names(trees["train"])
    _require_classes(classes, trees["train"], kind)
    for split, tree in trees.items():
        if split != "train":
            _require_known_classes(tree, trees["train"], kind)
    reader.warn_of_left_out(path)
    return trees


def _read_split(reader: FolderReader, folder: Path, kind: FileKind) -> dict[str, list[Path]]:
    """Return the files of each class; nothing if there are no class folders."""
    content = reader.scan(folder)
    loose = content.files
    if not content.folders:
        if loose and folder.name == "train":
            raise ConfigError(
                f"data.path: no class folders in {folder}; its "
                f"{plural(len(loose), kind.noun)} belong into one folder for each class"
            )
        return {}
    if loose:
        raise ConfigError(
            f"data.path: {folder} has {plural(len(loose), kind.noun)} outside of its class "
            f"folders, as {loose[0].name}; move each {kind.noun} into the "
            "folder of its class or delete it"
        )
    files = {}
    names: dict[Path, str] = {}
    for class_folder in sorted(content.folders, key=lambda path: natural_order(path.name)):
        other = names.setdefault(class_folder.resolve(), class_folder.name)
        if other != class_folder.name:
            raise ConfigError(
                f"data.path: '{other}' and '{class_folder.name}' in {folder} are two names of one "
                f"folder, so each {kind.noun} would have both classes; remove one of the names"
            )
        files[class_folder.name] = list(reader.walk(class_folder))
    if not any(files.values()):
        raise ConfigError(
            f"data.path: {folder} has no class folders with {kind.noun}s; {kind.noun}s end in "
            f"{kind.listed_endings}"
        )
    return files


def _require_distinct_names(tree: ClassTree) -> None:
    """Raise ConfigError if two class folders have one name in two spellings."""
    spellings: dict[str, str] = {}
    for name in tree.files:
        folded = unicodedata.normalize("NFC", name).casefold()
        other = spellings.setdefault(folded, name)
        if other != name:
            raise ConfigError(
                f"data.path: the class folders '{other}' and '{name}' in {tree.folder} differ in "
                "the case of letters or in their encoding only; merge them or rename one"
            )


def _require_classes(classes: int, tree: ClassTree, kind: FileKind) -> None:
    """Raise ConfigError unless there are `classes` classes, each with a file."""
    empty = [name for name, files in tree.files.items() if not files]
    if empty:
        raise ConfigError(
            f"data.path: {tree.folder / empty[0]} has no {kind.noun}s; add {kind.noun}s that "
            f"end in one of {kind.listed_endings}, or delete the folder"
        )
    if len(tree.files) != classes:
        names = list_names(list(tree.files))
        raise ConfigError(
            f"data.classes: {classes}, but {tree.folder} has {kind.noun}s of {len(tree.files)} "
            f"classes: {names}; a class is a folder directly below train"
        )


def _require_known_classes(tree: ClassTree, train: ClassTree, kind: FileKind) -> None:
    """Raise ConfigError for a class that train lacks; warn about classes without a file."""
    for name in tree.files:
        if name not in train.files:
            hint = suggest(name, train.files)
            raise ConfigError(f"data.path: {tree.folder / name}: no such class in train{hint}")
    absent = [name for name in train.files if not tree.files.get(name)]
    if absent:
        LOG.warning(
            f"data.path: {tree.folder} has no {kind.noun} of {len(absent)} of the "
            f"{len(train.files)} classes of train: {list_names(absent)}; metrics "
            "on it do not cover them"
        )
