"""Images on the disk, in folders of classes or in tar files."""

from pathlib import Path

from pydantic import Field, PositiveInt

from lit_attn.data.class_folders import read_class_folders
from lit_attn.data.folders import FolderReader, natural_order, require_splits
from lit_attn.data.image_files import ImageFiles
from lit_attn.data.image_lists import Files, make_files
from lit_attn.data.sets import hold_out
from lit_attn.data.splits import warn_of_shared_files
from lit_attn.data.tar_shards import read_shard
from lit_attn.schema.errors import ConfigError


class ClassFolders(ImageFiles):
    """Images in class folders."""

    def list_files(self) -> dict[str, Files]:
        return list_folders(self)


class ImageFolder(ClassFolders, kind="image-folder"):
    """Class folders of the user. Identities and tables contain `name` and not the path."""


class ImageNet(ClassFolders, kind="imagenet"):
    """ILSVRC 2012: 1,281,167 images to train, 50,000 to evaluate (its validation set)."""

    has_val_files = False
    name: str = Field("imagenet", description="name of the data set in identities and tables")
    classes: PositiveInt = Field(1000, description="number of classes")


def list_folders(data: ClassFolders) -> dict[str, Files]:
    """Return the images of "train", "test" and, if it exists or is held out, "val".

    Images are in the natural order of their paths. Raises ConfigError and warns as
    `read_class_folders`.
    """
    trees = read_class_folders(data.path, data.classes)
    numbers = {name: number for number, name in enumerate(trees["train"].files)}
    files = {}
    for split, tree in trees.items():
        samples = []
        for name, images in tree.files.items():
            names = [str(image.relative_to(tree.folder)) for image in images]
            samples += [(image, numbers[name]) for image in names]
        samples.sort(key=lambda sample: natural_order(sample[0]))
        files[split] = make_files(tree.folder, samples)
    return _hold_out(data, files)


class WebDataset(ImageFiles, kind="webdataset"):
    """Images in tar files: path/train/*.tar, and path/val/*.tar or path/test/*.tar.

    A sample is an image, as KEY.jpg or KEY.png, and KEY.cls, which has the number of the class. The
    files are read at random places, so every batch is the same on any number of processes.
    """

    def list_files(self) -> dict[str, Files]:
        return list_shards(self)


def list_shards(data: WebDataset) -> dict[str, Files]:
    """Return the images of "train", "test" and, if they exist or are held out, "val".

    Raises ConfigError for a folder or a tar file that cannot be read.
    """
    reader = FolderReader("data.path", [".tar"])
    shards: dict[str, list[Path]] = {}
    folders: dict[str, Path] = {}
    for split in ("train", "test", "val"):
        folder = data.path / split
        paths = reader.list_files(folder) if folder.is_dir() else []
        paths.sort(key=lambda path: natural_order(path.name))
        if paths:
            shards[split] = paths
            folders[split] = folder
    files = {}
    named_shards = require_splits(shards, data.path, "*.tar files")
    warn_of_shared_files(folders, "data.path")
    for split, paths in named_shards.items():
        samples: list[tuple[str, int]] = []
        for path in paths:
            samples.extend(read_shard(path, data.classes))
        if not samples:
            raise ConfigError(f"data.path: the tar files of {paths[0].parent} have no samples")
        files[split] = make_files(paths[0].parent, samples)
    reader.warn_of_left_out(data.path)
    return _hold_out(data, files)


def _hold_out(data: ImageFiles, files: dict[str, Files]) -> dict[str, Files]:
    train = files["train"]
    for split, rows in hold_out(data.validation, "val" in files, train.labels).items():
        files[split] = Files(train.folder, train.names[rows], train.labels[rows])
    return files
