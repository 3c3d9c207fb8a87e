"""What a cell measures, by name, known from its experiment alone: nothing is read or built.

A name is `<split>/<name>`, of averaged weights `<split>/ema-<name>`.
"""

from lit_attn.cells.records import Metric
from lit_attn.config.data.base import Data
from lit_attn.config.data.class_folders import ClassFolders
from lit_attn.config.data.composition import TASK_NAMES
from lit_attn.config.data.images import Digits, Given, Images
from lit_attn.config.data.segmentation import SCENE_CLASSES, Ade20k, Scenery
from lit_attn.config.data.text import TextFiles
from lit_attn.config.experiment import Experiment
from lit_attn.schema.errors import suggest

# Of every split, by task. What depends on names of classes or tasks comes after these.
CLASSIFICATION = ("accuracy", "top5", "calibration", "loss")
NAMES = {
    "image-classification": CLASSIFICATION,
    "sequence-classification": CLASSIFICATION,
    "language-modelling": ("loss", "perplexity", "bits_per_byte", "word_perplexity"),
    "segmentation": ("mIoU", "mAcc", "aAcc", "loss"),
    "head-composition": ("accuracy", "trained", "held-out", "loss"),
}

OVERLAPS = tuple(f"IoU:{name}" for name in SCENE_CLASSES)

# Of the run as a whole.
OF_TRAINING = ("train/loss", "train/lr", "train/mfu")
OF_TOKENS = "train/tokens_per_second"
OF_EVALUATION = "evaluation/seconds"


def check(metric: Metric, experiment: Experiment) -> None:
    """Raise ValueError where no cell of `experiment` measures `metric`, naming the nearest.

    What only the data can say is left to those who read it: whether a folder has a validation
    split, and the names of ADE20K's classes.
    """
    known = measured(experiment)
    split, _, name = metric.name.partition("/")
    bare = name.removeprefix("ema-")
    evaluated = split in _splits(experiment.data)
    if metric.averaged and evaluated and experiment.training.ema is None:
        raise ValueError(f"'{metric.name}' is of averaged weights; set training.ema")
    if metric.name not in known and not (
        evaluated and isinstance(experiment.data, Ade20k) and bare.startswith("IoU:")
    ):
        raise ValueError(f"'{metric.name}' is not measured{_hint(metric.name, known)}")
    if metric.selection == "best-validation" and not evaluated:
        raise ValueError(f"'{metric.name}' has no best validation: give it `selection: last`")
    if metric.selection == "best-validation" and "val" not in _splits(experiment.data):
        raise ValueError("best-validation needs images held out: set data.validation")


def measured(experiment: Experiment) -> list[str]:
    """Every name that a cell may record, the plain ones first."""
    names: tuple[str, ...] = NAMES[experiment.task]
    if experiment.task == "head-composition":
        names += TASK_NAMES
    if isinstance(experiment.data, Scenery) and not isinstance(experiment.data, Ade20k):
        names += OVERLAPS
    kinds = ["", "ema-"] if experiment.training.ema is not None else [""]
    splits = _splits(experiment.data)
    found = [f"{split}/{kind}{name}" for split in splits for kind in kinds for name in names]
    tokens = experiment.task not in ("image-classification", "segmentation")
    return [*found, *OF_TRAINING, *([OF_TOKENS] if tokens else []), OF_EVALUATION]


def _splits(data: Data) -> tuple[str, ...]:
    """What is evaluated, or may be where only the files can tell."""
    if isinstance(data, Images) and not isinstance(data, Digits | Given) and not data.validation:
        return ("test",)
    if isinstance(data, ClassFolders | Scenery) and not data.validation:
        return ("test",)
    if isinstance(data, TextFiles) and data.test is None:
        return ("val",)
    return ("test", "val")


def _hint(given: str, known: list[str]) -> str:
    """The nearest of all; where none is near, the choices without those of one class or task."""
    close = suggest(given, known)
    return close if "did you mean" in close else suggest("", [n for n in known if ":" not in n])
