"""Tasks: what is trained and measured, as far as YAML and a dry run need to know."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from lit_attn.config.losses import Loss
from lit_attn.config.optimizers import Optimizer
from lit_attn.config.schedules import Rate
from lit_attn.config.signatures import (
    ImageLabels,
    ImageMasks,
    LabelledTokens,
    Questions,
    Signature,
    TokenStream,
)
from lit_attn.schema.base import Kind, load

if TYPE_CHECKING:
    from torch import nn


class MetricInfo(NamedTuple):
    """Name of a metric without its split, and how tables print it.

    `label` heads the column, `scale` turns the logged value into the printed one, and `goal` says
    which direction is better. A `*` at the end stands for names that only the files know.
    """

    name: str
    label: str
    scale: float = 1.0
    goal: Literal["max", "min"] = "min"

    def match(self, name: str) -> "MetricInfo | None":
        """Return this metric with the label for `name`, or None if `name` is another metric."""
        prefix = self.name.removesuffix("*")
        if prefix == self.name or not name.startswith(prefix):
            return self if name == self.name else None
        return self._replace(name=name, label=self.label.replace("*", name.removeprefix(prefix)))


class Task(Kind):
    """Family of the tasks: loss, metrics and the LightningModule that computes them.

    A member defines `kind`, `takes`, its own keys, `build` and `metrics`. In YAML the kind alone
    stands for a task with default values: `task: language-modelling`.
    """

    takes: ClassVar[tuple[type[Signature], ...]]
    """Signature types of the data that the task can be trained on."""

    @abstractmethod
    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        """Return the `lit_attn.tasks.base.TaskModule` that trains `network`.

        `data` is what the data configuration builds. `rate` maps a step to its learning rate. Code
        that needs PyTorch is imported here and not at the top of the file.
        """

    @abstractmethod
    def metrics(self, signature: Any) -> tuple[MetricInfo, ...]:
        """Return the metrics of every evaluated split, the most important one first.

        The metric `loss` is among them. The task module computes metrics of the same names.
        """


def percent(name: str, label: str, goal: Literal["max", "min"] = "max") -> MetricInfo:
    """Return a metric that is logged as a fraction and printed in percent."""
    return MetricInfo(name, f"{label} (%)", 100.0, goal)


CLASSIFICATION = (
    percent("accuracy", "accuracy"),
    percent("top5", "top-5 accuracy"),
    percent("calibration", "expected calibration error", "min"),
    MetricInfo("loss", "loss (nats)"),
)


class ImageClassificationConfig(Task):
    """Classification of images; the default task."""

    kind: Literal["image-classification"] = "image-classification"
    takes = (ImageLabels,)

    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        module = load("lit_attn.tasks.classification:Classification")
        return module(network, data, loss.build(), optimizer, rate)

    def metrics(self, signature: ImageLabels) -> tuple[MetricInfo, ...]:
        return CLASSIFICATION


class SequenceClassificationConfig(Task):
    """Classification of token sequences, or of pairs of them."""

    kind: Literal["sequence-classification"] = "sequence-classification"
    takes = (LabelledTokens,)

    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        module = load("lit_attn.tasks.classification:SequenceClassification")
        return module(network, data, loss.build(), optimizer, rate)

    def metrics(self, signature: LabelledTokens) -> tuple[MetricInfo, ...]:
        return CLASSIFICATION


class LanguageModellingConfig(Task):
    """Prediction of the next token.

    `bits_per_byte` and `word_perplexity` are measured if the data count bytes and words.
    """

    kind: Literal["language-modelling"] = "language-modelling"
    takes = (TokenStream,)

    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        module = load("lit_attn.tasks.language:LanguageModelling")
        return module(network, data, optimizer, rate)

    def metrics(self, signature: TokenStream) -> tuple[MetricInfo, ...]:
        return (
            MetricInfo("loss", "loss (nats per token)"),
            MetricInfo("perplexity", "perplexity"),
            MetricInfo("bits_per_byte", "bits per byte"),
            MetricInfo("word_perplexity", "word perplexity"),
        )


class HeadCompositionTaskConfig(Task):
    """Questions that need two heads in sequence (DCMHA section 4.3), with accuracies by task."""

    kind: Literal["head-composition"] = "head-composition"
    takes = (Questions,)

    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        module = load("lit_attn.tasks.composition:HeadComposition")
        return module(network, data, optimizer, rate)

    def metrics(self, signature: Questions) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy"),
            percent("trained", "accuracy on trained tasks"),
            percent("held-out", "accuracy on held-out tasks"),
            MetricInfo("loss", "loss (nats)"),
            *(percent(name, f"accuracy on {name}") for name in signature.tasks),
        )


class SegmentationConfig(Task):
    """Semantic segmentation with mmsegmentation's loss and inference."""

    kind: Literal["segmentation"] = "segmentation"
    takes = (ImageMasks,)

    def build(
        self, network: "nn.Module", data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        module = load("lit_attn.tasks.segmentation:Segmentation")
        return module(network, data, optimizer, rate)

    def metrics(self, signature: ImageMasks) -> tuple[MetricInfo, ...]:
        return (
            percent("mIoU", "mIoU"),
            percent("mAcc", "mean class accuracy"),
            percent("aAcc", "pixel accuracy"),
            MetricInfo("loss", "loss (nats)"),
            *(percent(f"IoU:{name}", f"IoU of {name}") for name in signature.names or "*"),
        )
