"""Random crops and RandAugment of big_vision (TensorFlow), and experiments/imagenet_vit_small.yaml.

The random numbers of TensorFlow cannot be repeated here, so the rows compare distributions:
`identical` counts those that agree, and `difference` is the largest statistic of a two-sample
Kolmogorov-Smirnov test. `crops` are the top, left, height and width of random crops of pictures of
four sizes, by the released decode_jpeg_and_inception_crop(224). `operations` are the operations
that the released randaug(2,10) applies, and `strengths` their absolute strengths. Cutout is left
out, since timm's RandAugment does not have it (docs/setups.md, section 15). Recording needs
tensorflow.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from scipy.stats import ks_2samp

from lit_attn.data.image_files import Reader, list_folders
from lit_attn.data.loading import use_seed
from released import pictures, vision
from released.record import Clone
from released.recording import Arrays

REPOSITORY, COMMIT, RUNS = "google-research/big_vision", "0127fb6", ["0"]
EXPERIMENT = "experiments/imagenet_vit_small.yaml"
LIBRARIES = ("tensorflow",)
TOLERANCES = {"crops": 0.08, "operations": 0.1, "strengths": 0.01}
"""A test at the level 1e-5 rejects 2,000 values at 0.078, and 1,000 operations at 0.11."""

SIZES = ((180, 240), (240, 180), (200, 200), (90, 300))
"""(height, width) of the pictures that are cropped."""
CROPS, OPERATIONS = 2000, 1000
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
)
"""Operations that both sides have."""

Applied = tuple[str, float]
"""Name of an operation and its strength, 0 for an operation without one."""


def record(clone: Clone, run: str) -> Arrays:
    """Draw crops and operations by the released code with seed `run`."""
    import tensorflow as tf

    tf.random.set_seed(int(run))
    # The package of these transformations is gone; the recorder replaces all that call it.
    for name in ("tensorflow_addons", "tensorflow_addons.image"):
        sys.modules[name] = ModuleType(name)
    sys.modules["tensorflow_addons"].image = sys.modules["tensorflow_addons.image"]  # type: ignore
    pipeline = "big_vision/pp"
    ops_image = clone.load("released_ops", f"{pipeline}/ops_image.py", {})
    autoaugment = clone.load("released_policies", f"{pipeline}/archive/autoaugment.py", {})
    tf.image.decode_and_crop_jpeg = lambda _, window, **__: window
    crop = ops_image.get_decode_jpeg_and_inception_crop(None)
    windows = []
    for height, width in SIZES:
        jpeg = tf.io.encode_jpeg(np.zeros((height, width, 3), np.uint8))
        drawn = [crop({"image": jpeg})["image"].numpy() for _ in range(CROPS)]
        windows += list(np.transpose(drawn))
    applied: list[Applied] = []

    def replacement(name: str, fills: bool) -> Callable[..., Any]:
        def note(image: Any, *strength: Any) -> Any:
            applied.append((name, abs(float(strength[0])) if strength else 0.0))
            return image

        def note_filled(image: Any, strength: Any, replace: Any) -> Any:
            return note(image, strength)

        return note_filled if fills else note

    for name, function in list(autoaugment.NAME_TO_FUNC.items()):
        fills = "replace" in inspect.getfullargspec(function).args
        autoaugment.NAME_TO_FUNC[name] = replacement(name, fills)
    pixels = tf.zeros((224, 224, 3), tf.uint8)
    while len([name for name, _ in applied if name in NAMES]) < OPERATIONS:
        autoaugment.distort_image_with_randaugment(pixels, 2, 10)
    return described(windows, [pair for pair in applied if pair[0] in NAMES])


def described(windows: list[Any], applied: list[Applied]) -> Arrays:
    """Return crops (pictures x 4, CROPS), operations (1, OPERATIONS) and strengths (names,)."""
    return {
        "crops": np.asarray(windows, dtype=np.int16),
        "operations": np.array([[NAMES.index(name) for name, _ in applied[:OPERATIONS]]]),
        "strengths": np.array([dict(applied)[name] for name in NAMES]),
    }


def compare(name: str, ours: Arrays, theirs: Arrays) -> pictures.Comparison:
    """Compare distributions, one in each row, or strengths by their relative difference."""
    if name == "strengths":
        differences = np.abs(ours[name] / np.maximum(theirs[name], 1e-9) - 1)
        differences = differences[theirs[name] > 0]
    else:
        pairs = zip(ours[name], theirs[name], strict=True)
        differences = np.array([ks_2samp(*pair).statistic for pair in pairs])
    agreeing = int((differences <= TOLERANCES[name]).sum())
    return pictures.Comparison(len(differences), agreeing, float(differences.max()))


def replay(run: str, folder: Path) -> Arrays:
    """Draw crops and operations by the shipped experiment."""
    cell = vision.folder_cell(
        EXPERIMENT.removeprefix("experiments/"),
        folder,
        images=8,
        batch=4,
        side=224,
        changes={},
        seed=int(run),
    )
    data: Any = cell.experiment.data
    reader = Reader(data, list_folders(data)["train"], augmented=True)
    crop, _, policy = reader.transforms[224].transforms[:3]
    windows: list[Any] = []
    applied: list[Applied] = []

    def replacement(name: str) -> Callable[..., Any]:
        def note(image: Any, *strength: float, **_: Any) -> Any:
            moved = 224 if name.startswith("Translate") else 1
            applied.append((name, abs(moved * strength[0]) if strength else 0.0))
            return image

        return note

    for operation in policy.ops:
        operation.aug_fn = replacement(operation.name.removesuffix("Rel"))
    with use_seed(int(run)):
        for height, width in SIZES:
            picture = Image.new("RGB", (width, height))
            drawn = [crop.get_params(picture, crop.scale, crop.ratio) for _ in range(CROPS)]
            windows += list(np.transpose(drawn))
        for _ in range(OPERATIONS // 2):
            policy(Image.new("RGB", (224, 224)))
    return described(windows, applied)
