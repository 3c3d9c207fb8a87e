"""Images of big_vision (TensorFlow), and experiments/imagenet_vit_small/experiment.yaml.

The random numbers of TensorFlow cannot be repeated here, so two rows compare distributions:
`crops` are the top, left, height and width of random crops of pictures of four sizes, by the
released decode_jpeg_and_inception_crop(224), and `operations` are the operations that the released
randaug(2,10) applies. In both, `identical` counts the distributions that agree, and `difference` is
the largest statistic of a two-sample Kolmogorov-Smirnov test. In the other rows both sides have the
same window, sign and square: `applied` are pictures to which each operation was applied at its
strength, `resized` are windows at the size of training images, and `evaluated` are images of
evaluation. Values of their bytes that are not identical differ by one, because TensorFlow and
Pillow round differently, but for pixels at the edge of sheared pictures. The package
tensorflow_addons is gone; the recorder computes its rotations, translations and projective maps
with the operation of TensorFlow that it called. Recording needs tensorflow.
"""

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
from PIL import Image
from scipy.stats import ks_2samp

from lit_attn.data.loading import use_seed
from lit_attn.schema.plugins import load_parts
from released import big_vision, pictures, vision
from released.record import Clone
from released.recording import Arrays

REPOSITORY, COMMIT, RUNS = "google-research/big_vision", "0127fb6", ["0"]
EXPERIMENT = "experiments/imagenet_vit_small/experiment.yaml"
LIBRARIES = ("tensorflow",)
TOLERANCES = {"crops": 0.08, "operations": 0.1, "applied": 8.0, "resized": 3.0, "evaluated": 3.0}
"""A test at the level 1e-5 rejects 2,000 values at 0.078, and 1,000 operations at 0.11.

A difference of one byte at all places changes a sum by less than 3, and the edge of a sheared
picture by less than 8.
"""

SIZES = ((180, 240), (240, 180), (200, 200), (90, 300))
"""(height, width) of the pictures that are cropped."""
CROPS, OPERATIONS, SIDE, EVALUATED, CENTRE = 2000, 1000, 224, 56, (30, 190)
"""CENTRE is the row and column of the square of Cutout."""
NAMES = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Cutout",
)
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


def cases() -> list[tuple[str, int]]:
    """Return the compared operations and their signs."""
    return [(name, sign) for name in NAMES for sign in ((1, -1) if name in SIGNED else (1,))]


def squares() -> list[np.ndarray]:
    """Return the pictures to which operations are applied."""
    drawn = [Image.fromarray(pictures.picture(f"applied {number}")) for number in range(2)]
    return [np.asarray(image.resize((SIDE, SIDE))) for image in drawn]


def windows() -> list[np.ndarray]:
    """Return the pictures that are resized and evaluated."""
    return [pictures.picture(f"resized {number}") for number in range(8)]


def record(clone: Clone, run: str) -> Arrays:
    """Draw crops and operations by the released code with seed `run`, and transform pictures."""
    import tensorflow as tf

    tf.random.set_seed(int(run))

    def transform(images: Any, maps: Any) -> Any:
        return tf.raw_ops.ImageProjectiveTransformV3(
            images=images[None],
            transforms=tf.constant([maps], tf.float32),
            output_shape=tf.shape(images)[:2],
            interpolation="NEAREST",
            fill_mode="CONSTANT",
            fill_value=0.0,
        )[0]

    def rotate(image: Any, radians: float) -> Any:
        # The maps of tensorflow_addons: around the middle between the first and the last pixel.
        cosine, sine, last = math.cos(radians), math.sin(radians), SIDE - 1
        left = (last - (cosine * last - sine * last)) / 2
        top = (last - (sine * last + cosine * last)) / 2
        return transform(image, [cosine, -sine, left, sine, cosine, top, 0.0, 0.0])

    contrib = ModuleType("tensorflow_addons.image")
    contrib.transform, contrib.rotate = transform, rotate
    contrib.translate = lambda image, by: transform(
        image, [1.0, 0.0, -by[0], 0.0, 1.0, -by[1], 0.0, 0.0]
    )
    sys.modules["tensorflow_addons"] = addons = ModuleType("tensorflow_addons")
    sys.modules["tensorflow_addons.image"] = addons.image = contrib
    pipeline = "big_vision/pp"
    ops = clone.load("released_ops", f"{pipeline}/ops_image.py", {})
    policies = clone.load("released_policies", f"{pipeline}/archive/autoaugment.py", {})
    resize, small = ops.get_resize(SIDE), ops.get_resize_small(round(EVALUATED / 0.875))
    centre = ops.get_central_crop(EVALUATED)

    def apply(name: str, sign: int, pixels: np.ndarray) -> torch.Tensor:
        function = policies.NAME_TO_FUNC[name]
        strength = policies.level_to_arg(policies.HParams(40, 100))[name](10.0)
        values = [sign * abs(value) if name in SIGNED else value for value in strength]
        values += [[128, 128, 128]] if name in (*SIGNED, "Cutout") else []
        with patch.object(policies.tf, "random_uniform", Mock(side_effect=[*CENTRE])):
            return as_tensor(function(tf.constant(pixels), *values).numpy())

    def strengths_of_both_signs() -> Any:
        return patch.object(policies, "_randomly_negate_tensor", lambda value: value)

    with strengths_of_both_signs():
        applied = [apply(*case, square) for case in cases() for square in squares()]
    resized = [resize({"image": tf.constant(p)})["image"].numpy() for p in windows()]
    evaluated = [centre(small({"image": tf.constant(p)}))["image"].numpy() for p in windows()]
    described = describe(applied, map(as_tensor, resized), map(as_tensor, evaluated))
    tf.image.decode_and_crop_jpeg = lambda _, window, **__: window
    crop = ops.get_decode_jpeg_and_inception_crop(None)
    drawn_windows: list[Any] = []
    for height, width in SIZES:
        jpeg = tf.io.encode_jpeg(np.zeros((height, width, 3), np.uint8))
        drawn_windows += list(
            np.transpose([crop({"image": jpeg})["image"].numpy() for _ in range(CROPS)])
        )
    names: list[str] = []

    def replacement(name: str, fills: bool) -> Callable[..., Any]:
        def note(image: Any, *_: Any) -> Any:
            names.append(name)
            return image

        # The released code finds an argument of this name.
        def note_filled(image: Any, strength: Any, replace: Any) -> Any:
            return note(image)

        return note_filled if fills else note

    for name in NAMES:
        policies.NAME_TO_FUNC[name] = replacement(name, name in (*SIGNED, "Cutout"))
    while len(names) < OPERATIONS:
        policies.distort_image_with_randaugment(tf.zeros((8, 8, 3), tf.uint8), 2, 10)
    return described | distributions(drawn_windows, names)


def as_tensor(image: Any) -> torch.Tensor:
    """Return an image of bytes as a tensor."""
    return torch.from_numpy(np.array(image))


def describe(applied: Any, resized: Any, evaluated: Any) -> Arrays:
    """Return the descriptions of images after operations, of resized and of evaluated images."""
    named = {"applied": applied, "resized": resized, "evaluated": evaluated}
    arrays: Arrays = {}
    for name, images in named.items():
        arrays |= pictures.describe(name, images)
    return arrays


def distributions(windows: list[Any], names: list[str]) -> Arrays:
    """Return crops (pictures x 4, CROPS) and operations (1, OPERATIONS)."""
    numbers = [NAMES.index(name) for name in names[:OPERATIONS]]
    return {"crops": np.asarray(windows, dtype=np.int16), "operations": np.array([numbers])}


def compare(name: str, ours: Arrays, theirs: Arrays) -> pictures.Comparison:
    """Compare images by their descriptions, and other results by the distribution in each row."""
    if name not in ("crops", "operations"):
        return pictures.compare(name, ours, theirs)
    pairs = zip(ours[name], theirs[name], strict=True)
    differences = np.array([ks_2samp(*pair).statistic for pair in pairs])
    agreeing = int((differences <= TOLERANCES[name]).sum())
    return pictures.Comparison(len(differences), agreeing, float(differences.max()))


def replay(run: str, folder: Path) -> Arrays:
    """Draw crops and operations by the shipped experiment, and transform the same pictures."""
    load_parts(big_vision.PLUG_INS)
    import imagenet_vit_small as plug_in

    for number, pixels in enumerate(windows()):
        pictures.write(folder / "evaluated" / f"{number}.png", pixels)
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=8,
        batch=4,
        side=EVALUATED,
        changes={"data.validation": 0, "model.patch": 14},
        seed=int(run),
    )
    data: Any = cell.experiment.data.build(int(run), torch.device("cpu"))
    crop, _, augment = data.train.transforms[EVALUATED].transforms[:3]
    resize, centre = data.evaluated["test"].transforms[EVALUATED].transforms[:2]
    assert augment is plug_in.augment
    assert tuple(plug_in.OPERATIONS) == NAMES
    applied = []
    for name, sign in cases():
        for square in squares():
            with patch.object(random, "randrange", Mock(side_effect=[*CENTRE])):
                applied.append(as_tensor(plug_in.OPERATIONS[name](Image.fromarray(square), sign)))
    resized = []
    for pixels in windows():
        whole = Mock(return_value=(0, 0, *pixels.shape[:2]))
        resized.append(as_tensor(plug_in.crop_window(whole, SIDE, Image.fromarray(pixels))))
    evaluated = [as_tensor(centre(resize(Image.fromarray(pixels)))) for pixels in windows()]
    drawn_windows: list[Any] = []
    names: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def noting(image: Image.Image, sign: int) -> Image.Image:
            assert sign in (-1, 1)
            names.append(name)
            return image

        return noting

    draw = crop.args[0]
    with (
        use_seed(int(run)),
        patch.dict(plug_in.OPERATIONS, {name: note(name) for name in NAMES}),
    ):
        for height, width in SIZES:
            picture = Image.new("RGB", (width, height))
            drawn_windows += list(np.transpose([draw(picture) for _ in range(CROPS)]))
        for _ in range(OPERATIONS // 2):
            augment(Image.new("RGB", (8, 8)))
    return describe(applied, resized, evaluated) | distributions(drawn_windows, names)
