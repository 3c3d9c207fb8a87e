"""Pairs of images and label masks in ADE20K's layout: listing, reading and checking them.

Shapes: image (h, w, 3) uint8 BGR; labels (h, w) uint8, from 0 to classes - 1 or IGNORED.
"""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_attn.data.folders import FolderReader, list_names
from lit_attn.data.log import LOG
from lit_attn.data.pictures import MASK_ENDINGS, read_mask, read_picture
from lit_attn.schema.errors import ConfigError, plural

IGNORED = 255  # Label of the pixels that have no class.

Labels = NDArray[np.uint8]
Pair = tuple[Path, Path]
"""An image file and the file of its labels."""


class Labelling(Protocol):
    """Numbers or colours of the classes in the label files of a data set."""

    @property
    def first_label(self) -> int:
        """Number of the first class; the numbers below it mean no class."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, if the files have colours."""

    @property
    def label_colours(self) -> dict[tuple[int, int, int], int]:
        """Label of each colour; empty if the files have numbers."""

    @property
    def void_numbers(self) -> tuple[int, ...]:
        """Further numbers that mean no class."""

    @property
    def void_hint(self) -> str:
        """End of the message about an unknown number."""


def list_pairs(root: Path, split: str) -> list[Pair]:
    """Return the pairs of a split by name; warn about files that are left out.

    Raises ConfigError for a missing folder, a split without images, an image without labels, and
    two files with one name.
    """
    images = root / "images" / split
    annotations = root / "annotations" / split
    for folder in (images, annotations):
        if not folder.is_dir():
            inside = root / "ADEChallengeData2016"
            hint = f"; did you mean {inside}?" if inside.is_dir() else ""
            raise ConfigError(
                f"data.root: {folder} is not a folder; ADE20K's layout is needed "
                f"(`kind: scenes` needs no download){hint}"
            )
    image_reader = FolderReader("data.root")
    mask_reader = FolderReader("data.root", MASK_ENDINGS)
    image_files = _index_by_name(image_reader.list_files(images))
    mask_files = _index_by_name(mask_reader.list_files(annotations))
    if not image_files:
        raise ConfigError(
            f"data.root: {images} holds no images that end in "
            f"{', '.join(sorted(image_reader.endings))}"
        )
    for name, path in image_files.items():
        if name not in mask_files:
            raise ConfigError(
                f"data.root: {annotations / name}.png is missing; {path} needs a file of labels "
                f"(its ending may be {', '.join(sorted(MASK_ENDINGS))})"
            )
    image_reader.warn_of_left_out(images)
    mask_reader.warn_of_left_out(annotations)
    unused = [path for name, path in mask_files.items() if name not in image_files]
    if unused:
        LOG.warning(
            f"data.root: {annotations}: left out {plural(len(unused), 'label file')} without an "
            f"image of the same name, as {unused[0].name}"
        )
    return [(path, mask_files[name]) for name, path in image_files.items()]


def _index_by_name(files: list[Path]) -> dict[str, Path]:
    """Return files by their names without endings; raise ConfigError for two with one name."""
    by_name: dict[str, Path] = {}
    for path in files:
        other = by_name.setdefault(path.stem, path)
        if other != path:
            raise ConfigError(
                f"data.root: {other} and {path.name} have one name, by which images and labels "
                "belong together; rename or delete one of them"
            )
    return by_name


def read_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the image (h, w, 3), BGR, and its size; raise ConfigError if it cannot be read."""
    path = sample["img_path"]
    picture = read_picture(path, f"data.root: {path}", "RGB")
    image = np.ascontiguousarray(np.asarray(picture)[..., ::-1])
    size = image.shape[:2]
    return sample | {"img": image, "img_shape": size, "ori_shape": size}


def read_labels(sample: dict[str, Any], data: Labelling) -> dict[str, Any]:
    """Add the labels (h, w) uint8: the number of a class from 0 on, or IGNORED.

    Raises ConfigError for a malformed file, or for one without the image's size, `ori_shape`.
    """
    path = sample["seg_map_path"]
    has_colours = bool(data.label_colours)
    values = read_mask(path, f"data.root: {path}", has_colours=has_colours)
    _require_size_of_image(sample, values)
    find_labels = _find_colours if has_colours else _find_numbers
    labels = find_labels(path, values, data)
    return sample | {"gt_seg_map": labels, "seg_fields": ["gt_seg_map"], "reduce_zero_label": True}


def _require_size_of_image(sample: dict[str, Any], values: NDArray[Any]) -> None:
    """Raise ConfigError if the labels, upright, have another size than the image, upright."""
    height, width = values.shape[:2]
    image_height, image_width = sample["ori_shape"]
    if (height, width) == (image_height, image_width):
        return
    hint = "save the labels with the size of the image"
    if (height, width) == (image_width, image_height):
        hint = "turn one of them; files are read as their EXIF orientation says"
    raise ConfigError(
        f"data.root: {sample['seg_map_path']} has {width} x {height} pixels, its image "
        f"{sample['img_path']} has {image_width} x {image_height}; {hint}"
    )


def _find_numbers(path: Path, values: NDArray[Any], data: Labelling) -> Labels:
    """Return the labels of a file's numbers (h, w); raise ConfigError for an unknown number."""
    first = data.first_label
    last = first + data.num_classes - 1
    is_ignored = np.isin(values, data.void_numbers) | ((values >= 0) & (values < first))
    is_class = (values >= first) & (values <= last) & ~is_ignored
    unknown = values[~(is_class | is_ignored)]
    if unknown.size:
        raise ConfigError(
            f"data.root: {path} has the label {unknown.min()}; labels are {first} to {last} for "
            f"the classes, and {_list_void_numbers(data)} for no class{data.void_hint}"
        )
    return np.where(is_class, values - first, IGNORED).astype(np.uint8)


def _list_void_numbers(data: Labelling) -> str:
    """Return the numbers that mean no class, as "0 or 255"."""
    numbers = [*range(data.first_label), *data.void_numbers]
    return " or ".join(str(number) for number in dict.fromkeys(numbers))


def _find_colours(path: Path, colours: NDArray[np.uint8], data: Labelling) -> Labels:
    """Return the labels (h, w) of pixels (h, w, 3); raise ConfigError for an unknown colour."""
    numbers = data.label_colours
    packed = colours.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    values, places = np.unique(packed, return_inverse=True)
    labels = np.empty(len(values), np.uint8)
    for place, value in enumerate(values.tolist()):
        colour = (value >> 16, value >> 8 & 255, value & 255)
        if colour not in numbers:
            known = [key for key, label in numbers.items() if label != IGNORED]
            distances = np.abs(np.array(known) - colour).sum(1)
            nearest = known[int(distances.argmin())]
            raise ConfigError(
                f"data.colours: {path} has the colour {list(colour)}, which no class has; the "
                f"nearest is {list(nearest)} of '{data.class_names[numbers[nearest]]}' "
                "(data.void: the colour of pixels without a class)"
            )
        labels[place] = numbers[colour]
    return labels[places].reshape(packed.shape)


def warn_of_absent_classes(
    counts: NDArray[np.int64], names: tuple[str, ...], checked: int, total: int, data: Labelling
) -> None:
    """Warn once if classes have no pixel in the training labels.

    `counts` has the pixels of each class, and of IGNORED at the end, in `checked` of `total` label
    files. Rare classes may be in the files that were not read, so a warning about a part of the
    files needs at least half of the classes to be absent.
    """
    absent = [number for number in range(len(names)) if counts[number] == 0]
    is_complete = checked == total
    if not absent or (not is_complete and 2 * len(absent) < len(names)):
        return
    files = f"{total:,} training label files"
    if not is_complete:
        files = f"{checked:,} of the {files} that were read"
    listed = list_names([f"'{names[number]}'" for number in absent])
    classes = f"the class {listed}" if len(absent) == 1 else f"one of the classes {listed}"
    first_number = absent[0] + data.first_label
    if data.label_colours:
        remedy = f"give pixels of '{names[absent[0]]}' its colour in data.colours"
    elif counts[-1]:
        remedy = (
            f"{_list_void_numbers(data)} means no class; give pixels of '{names[absent[0]]}' the "
            f"number {first_number}"
        )
    else:
        remedy = f"give pixels of '{names[absent[0]]}' the number {first_number}"
    LOG.warning(
        f"data.root: no pixel of {files} has {classes}, which a model then cannot learn; "
        f"{remedy}, or leave the class out"
    )
