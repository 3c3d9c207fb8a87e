"""Scenes of real handwritten digits on textured ground, with a label for every pixel, as files.

Segmentation experiments run on them without a download. The files have ADE20K's layout. Training
scenes are made of the training digits of `kind: digits`, evaluation scenes of its test digits.

Shapes: ink (SIDE, SIDE) from 0 (paper) to 1; pictures (h, w, 3); labels (h, w), 0 no class, 1..13.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from pydantic import Field, PositiveInt

from lit_attn.data.image_sets import Digits
from lit_attn.data.images import load_splits
from lit_attn.files import one_at_a_time
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.data import Scenery
from lit_attn.segmentation.scene_steps import CategoryCrop, SceneAugmentation

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

VERSION = 3  # Changes whenever scenes look different, so that no old folder is used for them.
# Shift of red, green and blue for each ground.
TINTS = np.array([(-20, 20, -20), (20, 0, -20), (-20, -5, 25)])
HEIGHT = 32
WIDTHS = {"training": 32, "validation": 48}
DIGITS = (4, 8)  # Least and greatest number of drawn places; an occupied place stays as it is.
# Digits stand on a lattice and are 16 pixels wide, so that a small model learns to read them in a
# minute on a CPU. It learned nothing from digits at any place and of many sizes.
SIDE = 16
# Side of the square over which ink spreads: strokes are then as wide as a patch of 4 pixels.
STROKE = 3
# A pixel with at least DIGIT_INK belongs to the digit, one below GROUND_INK to the ground.
DIGIT_INK = 0.5
GROUND_INK = 0.25


# Classes of `kind: scenes`: three grounds and ten digits.
SCENE_CLASSES = ("stripes", "checks", "speckle", *(f"digit {number}" for number in range(10)))


class Scenes(Scenery, kind="scenes"):
    """scikit-learn's handwritten digits on textured ground: ten digits and three grounds.

    The images are written on first use to a folder below `root` and are equal for all seeds.
    Training images have 32 x 32 pixels; evaluation images are half as wide again, so that a window
    of 32 pixels slides. By default no image is flipped, because a mirrored digit is another one or
    none, and no image is rescaled or recoloured, because a small model would need longer.
    """

    num_classes: ClassVar = len(SCENE_CLASSES)
    class_names: ClassVar = SCENE_CLASSES
    root: Path = outside_identity(Path("data/scenes"), "folder to which the images are written")
    training_images: PositiveInt = Field(2000, description="number of training images")
    evaluation_images: PositiveInt = Field(200, description="number of evaluation images")
    augment: tuple[SceneAugmentation, ...] = Field(
        (CategoryCrop(),), description="augmentation steps in the order of their application"
    )
    crop: PositiveInt = Field(32, description="side of a training window in pixels")
    short_side: PositiveInt = Field(32, description="short side of a resized image in pixels")
    long_side: PositiveInt = Field(128, description="most pixels of a resized image's long side")

    def prepare(self) -> Path:
        return prepare(self)

    def check_files(self) -> None:
        """Do nothing: the images are written on first use."""


def prepare(data: Scenes) -> Path:
    """Return the folder of the scenes; write it first if it does not exist.

    Cells that start at once wait for the first. Raises ConfigError if the folder is not writable.
    """
    recipe = [VERSION, data.training_images, data.evaluation_images]
    folder = data.root / hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]
    try:
        data.root.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(data.root, "scenes"):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=data.root, prefix=".scenes-") as temporary:
                    written = Path(temporary) / "scenes"
                    _write(written, data)
                    written.rename(folder)
    except OSError as error:
        raise ConfigError(f"data.root: cannot write to {data.root}: {error.strerror}") from error
    return folder


def scene(width: int, images: Bytes, digits: Ids, generator: Generator) -> tuple[Bytes, Bytes]:
    """Return one picture and its labels, with digits drawn from `images` (N, 1, 8, 8)."""
    picture, labels = _ground(width, generator)
    taken = np.zeros((HEIGHT, width), dtype=bool)
    for _ in range(generator.integers(*DIGITS, endpoint=True)):
        chosen = generator.integers(len(images))
        top = SIDE * int(generator.integers(HEIGHT // SIDE))
        left = SIDE * int(generator.integers(width // SIDE))
        box = np.s_[top : top + SIDE, left : left + SIDE]
        if taken[box].any():
            continue
        taken[box] = True
        enlarged = Image.fromarray(images[chosen, 0]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        ink = np.asarray(enlarged.filter(ImageFilter.MaxFilter(STROKE)), dtype=np.float64) / 255
        # Lighter than every ground.
        tone = 240 + generator.uniform(-15, 15, 3)
        picture[box] += ink[..., None] * (tone - picture[box])
        labels[box][ink >= GROUND_INK] = 0
        labels[box][ink >= DIGIT_INK] = 4 + digits[chosen]
    return picture.clip(0, 255).astype(np.uint8), labels


def _write(folder: Path, data: Scenes) -> None:
    """Write the JPEG and PNG of every scene; scene i does not depend on the number of scenes."""
    splits = load_splits(Digits())
    counts = {"training": data.training_images, "validation": data.evaluation_images}
    for index, (name, count) in enumerate(counts.items()):
        digits = splits["train" if name == "training" else "test"]
        for kind in ("images", "annotations"):
            (folder / kind / name).mkdir(parents=True)
        for number in range(count):
            generator = np.random.default_rng([VERSION, index, number])
            picture, labels = scene(WIDTHS[name], digits.images, digits.labels, generator)
            stem = f"scene_{number:05d}"
            Image.fromarray(picture).save(folder / "images" / name / f"{stem}.jpg", quality=95)
            Image.fromarray(labels).save(folder / "annotations" / name / f"{stem}.png")


def _ground(width: int, generator: Generator) -> tuple[Floats, Bytes]:
    """Return two textures of similar colours that meet at a slanted horizon, and their labels."""
    y, x = np.mgrid[:HEIGHT, :width]
    horizon = HEIGHT * generator.uniform(0.3, 0.7) + generator.uniform(-0.2, 0.2) * (x - width / 2)
    below = y > horizon
    picture = np.empty((HEIGHT, width, 3))
    labels = np.empty((HEIGHT, width), dtype=np.uint8)
    kinds = generator.choice(3, size=2, replace=False)
    for kind, part in zip(kinds, (below, ~below), strict=True):
        # Much darker than the digits: on lighter ground of more contrast a small model reads fewer.
        dark = 60 + TINTS[kind] + generator.uniform(-25, 25, 3)
        light = dark + generator.uniform(25, 45)
        pattern = _texture(int(kind), y, x, generator)[..., None]
        picture[part] = (dark + pattern * (light - dark))[part]
        labels[part] = 1 + kind
    return picture, labels


def _texture(kind: int, y: Ids, x: Ids, generator: Generator) -> Floats:
    """Return stripes, checks or speckle, from 0 to 1; (h, w)."""
    if kind == 2:
        return generator.uniform(0, 1, y.shape)
    angle = generator.uniform(0, np.pi)
    period = generator.uniform(5, 9)
    along = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period)
    if kind == 0:
        return (1 + along) / 2
    across = np.sin(2 * np.pi * (y * np.cos(angle) - x * np.sin(angle)) / period)
    return np.where(along * across > 0, 1.0, 0.0)
