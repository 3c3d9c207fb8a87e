"""Images in folders of classes: path/SPLIT/CLASS/*, at any depth below CLASS.

The class of an image is the first folder below its split. Classes are numbered in the natural order
of the folders of train.
"""

import unicodedata
from pathlib import Path
from typing import NamedTuple

from lit_attn.config.data.images import ClassFolders
from lit_attn.data.folders import FolderReader, list_names, natural_order, require_splits
from lit_attn.data.log import LOG
from lit_attn.data.pictures import ENDINGS
from lit_attn.schema.errors import ConfigError, plural, suggest


class ClassTree(NamedTuple):
    """Folder of one split, and the images of each class by the name of its folder."""

    folder: Path
    images: dict[str, list[Path]]


def read_class_folders(data: ClassFolders) -> dict[str, ClassTree]:
    """Return the images of "train", "test" and, if it exists, "val".

    Classes are in the order of their numbers. Raises ConfigError for files that cannot be read and
    for folders that do not match `data`. Warns about files that are left out, and about classes
    that an evaluated split lacks.
    """
    reader = FolderReader("data.path")
    trees: dict[str, ClassTree] = {}
    for split in ("train", "test", "val"):
        folder = data.path / split
        if not folder.is_dir():
            continue
        images = _read_split(reader, folder)
        # ImageNet's folder test has images without classes, since their labels are secret.
        if images:
            trees[split] = ClassTree(folder, images)
    trees = require_splits(trees, data.path, "class folders")
    _require_distinct_names(trees["train"])
    _require_classes(data, trees["train"])
    for split, tree in trees.items():
        if split != "train":
            _require_known_classes(tree, trees["train"])
    reader.warn_of_left_out(data.path)
    return trees


def _read_split(reader: FolderReader, folder: Path) -> dict[str, list[Path]]:
    """Return the images of each class; nothing if there are no class folders."""
    content = reader.scan(folder)
    loose = content.files
    if not content.folders:
        if loose and folder.name == "train":
            raise ConfigError(
                f"data.path: no class folders in {folder.parent} / train; its "
                f"{plural(len(loose), 'image')} belong into one folder for each class"
            )
        return {}
    if loose:
        raise ConfigError(
            f"data.path: {folder} has {plural(len(loose), 'image')} outside of its class folders, "
            f"as {loose[0].name}; move each image into the folder of its class or delete it"
        )
    images = {}
    for class_folder in sorted(content.folders, key=lambda path: natural_order(path.name)):
        images[class_folder.name] = list(reader.walk(class_folder))
    if not any(images.values()):
        raise ConfigError(
            f"data.path: {folder} has no class folders with images; images end in "
            f"{', '.join(sorted(ENDINGS))}"
        )
    return images


def _require_distinct_names(tree: ClassTree) -> None:
    """Raise ConfigError if two class folders have one name in two spellings."""
    spellings: dict[str, str] = {}
    for name in tree.images:
        folded = unicodedata.normalize("NFC", name).casefold()
        other = spellings.setdefault(folded, name)
        if other != name:
            raise ConfigError(
                f"data.path: the class folders '{other}' and '{name}' in {tree.folder} differ in "
                "the case of letters or in their encoding only; merge them or rename one"
            )


def _require_classes(data: ClassFolders, tree: ClassTree) -> None:
    """Raise ConfigError unless there are `data.classes` classes, each with an image."""
    empty = [name for name, images in tree.images.items() if not images]
    if empty:
        raise ConfigError(
            f"data.path: {tree.folder / empty[0]} has no images; add images that end in one of "
            f"{', '.join(sorted(ENDINGS))}, or delete the folder"
        )
    if len(tree.images) != data.classes:
        names = list_names(list(tree.images))
        raise ConfigError(
            f"data.classes: {data.classes}, but {tree.folder} has images of {len(tree.images)} "
            f"classes: {names}; a class is a folder directly below train"
        )


def _require_known_classes(tree: ClassTree, train: ClassTree) -> None:
    """Raise ConfigError for a class that train lacks; warn about classes without an image."""
    for name in tree.images:
        if name not in train.images:
            hint = suggest(name, train.images)
            raise ConfigError(f"data.path: {tree.folder / name}: no such class in train{hint}")
    absent = [name for name in train.images if not tree.images.get(name)]
    if absent:
        LOG.warning(
            f"data.path: {tree.folder} has no image of {len(absent)} of the {len(train.images)} "
            f"classes of train: {list_names(absent)}; metrics on it do not cover them"
        )
