"""Tasks and losses: what is trained and measured, as far as YAML and a dry run need to know."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn import signatures
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Rate
from lit_attn.schema.base import Kind, OwnClass, Share, load, must_be
from lit_attn.tasks.metrics import Form, Goal, MetricInfo, Outputs, percent

MOST_PICTURES = 16
"""Most pictures of a segmentation that a cell saves."""


class Loss(Kind):
    """Base of the losses of the classification tasks; the default is cross-entropy."""

    default_kind: ClassVar[str] = "cross-entropy"

    @abstractmethod
    def build(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function from logits (B, classes) and targets to the mean loss, a scalar.

        Targets are class indices (B,), or probabilities (B, classes) after MixUp or CutMix.
        """

    def try_out(self, signature: Any) -> None:
        loss_function = self.build()
        logits = torch.zeros(2, 3, requires_grad=True)
        targets = torch.tensor([0, 1])
        loss_function(logits, targets).backward()


class CrossEntropyLoss(Loss, kind="cross-entropy"):
    """Cross-entropy."""

    label_smoothing: Share = Field(0.0, description="share of the target spread over all classes")

    def build(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(F.cross_entropy, label_smoothing=self.label_smoothing)


class Task(Kind):
    """Family of the tasks: loss, metrics and the LightningModule that computes them.

    A member defines `kind`, `takes`, its own keys, `metrics`, and `module` or `build`. In YAML the
    kind alone stands for a task with default values: `task: language-modelling`.
    """

    takes: ClassVar[tuple[type[signatures.Signature], ...]]
    """Signature types of the data that the task can be trained on."""

    module: ClassVar[str] = ""
    """Subclass of `lit_attn.tasks.base.TaskModule` that `build` calls, as `package.file:Class`."""
    uses_loss: ClassVar[bool] = False
    """True if the module has a `loss_function`; other tasks refuse the key `loss`."""
    predicts: ClassVar[tuple[Form, str] | None] = None
    """Form of the predictions, and the field of the signature with their size."""

    is_recordable: ClassVar[bool] = False
    """True if the module's `loss` runs the same kernels in each step, and nothing else that counts:
    `training.compile: step` repeats the kernels alone."""

    training_metrics: ClassVar[tuple[MetricInfo, ...]] = ()
    """Metrics of the samples that train, beside `train/loss`; the module's `training_values`."""

    @abstractmethod
    def metrics(self, signature: Any) -> tuple[MetricInfo, ...]:
        """Return the metrics of every evaluated split, the most important one first.

        The metric `loss` is among them. The task module computes metrics of the same names.
        """

    def build(
        self, network: nn.Module, data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        """Return the `lit_attn.tasks.base.TaskModule` that trains `network`.

        `data` is what the data configuration builds. `rate` maps a step to its learning rate. Code
        that needs PyTorch is imported here and not at the top of the file.
        """
        task = load(self.module)(network, data, optimizer, rate)
        task.config = self
        if self.uses_loss:
            task.loss_function = loss.build()
        return task

    def try_out(self, signature: Any) -> None:
        if type(self).build is not Task.build:
            return
        if not self.module:
            raise ValueError("needs `module` or a method `build`")
        if not issubclass(load(self.module), load("lit_attn.tasks.base:TaskModule")):
            raise ValueError(f"{self.module} is not a subclass of lit_attn.tasks.base.TaskModule")

    def outputs(self, signature: Any) -> Outputs | None:
        """Return the form of the predictions that metrics of the experiment get, if it is known."""
        if not self.predicts:
            return None
        form, size_field = self.predicts
        return Outputs(form, getattr(signature, size_field))


class ClassificationConfig(Task):
    """Base of the tasks whose samples have one label each."""

    predicts = ("probabilities", "classes")
    uses_loss = True
    training_metrics = (percent("train/accuracy", "training accuracy"),)

    def metrics(self, signature: Any) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy"),
            percent("top5", "top-5 accuracy"),
            percent("calibration", "expected calibration error", "min"),
            MetricInfo("loss", "loss (nats)"),
        )


class ImageClassificationConfig(ClassificationConfig, kind="image-classification"):
    """Classification of images; the default task."""

    is_recordable = True

    takes = (signatures.ImageLabels,)
    module = "lit_attn.tasks.classification:Classification"


class TabularClassificationConfig(ClassificationConfig, kind="tabular-classification"):
    """Classification of the rows of a table."""

    is_recordable = True

    takes = (signatures.ColumnLabels,)
    module = "lit_attn.tasks.classification:Classification"


class RegressionConfig(Task, kind="regression"):
    """Prediction of numbers from an image or a row of a table, by the mean squared error."""

    is_recordable = True
    takes = (signatures.ImageTargets, signatures.ColumnTargets)
    module = "lit_attn.tasks.classification:Regression"
    predicts = ("values", "outputs")

    def metrics(self, signature: signatures.ImageTargets) -> tuple[MetricInfo, ...]:
        return (
            MetricInfo("mae", "mean absolute error"),
            MetricInfo("rmse", "root mean squared error"),
            MetricInfo("r2", "R²", goal="max"),
            MetricInfo("loss", "mean squared error"),
        )


class SequenceClassificationConfig(ClassificationConfig, kind="sequence-classification"):
    """Classification of token sequences, or of pairs of them."""

    takes = (signatures.LabelledTokens,)
    module = "lit_attn.tasks.classification:SequenceClassification"


class TokenClassificationConfig(ClassificationConfig, kind="token-classification"):
    """Classification of the words of a text: the loss is the mean over all counted tokens."""

    takes = (signatures.TaggedTokens,)
    module = "lit_attn.tasks.classification:TokenClassification"

    def metrics(self, signature: Any) -> tuple[MetricInfo, ...]:
        return (
            percent("accuracy", "accuracy of tokens"),
            percent("f1", "macro F1"),
            MetricInfo("loss", "loss (nats per token)"),
        )


class LanguageModellingConfig(Task, kind="language-modelling"):
    """Prediction of the next token; `bits_per_byte` is measured if the data count bytes."""

    is_recordable = True
    takes = (signatures.TokenStream,)
    module = "lit_attn.tasks.language:LanguageModelling"
    predicts = ("probabilities", "vocabulary")

    def metrics(self, signature: signatures.TokenStream) -> tuple[MetricInfo, ...]:
        return (
            MetricInfo("loss", "loss (nats per token)"),
            MetricInfo("perplexity", "perplexity"),
            MetricInfo("bits_per_byte", "bits per byte"),
        )


class TranslationConfig(Task, kind="translation"):
    """Translation, by fairseq's label-smoothed cross-entropy, with BLEU of beam search.

    BLEU is that of sacrebleu on the words of the data (`--tokenize none`). Searches are slow, so by
    default only the last evaluation measures it.
    """

    takes = (signatures.ParallelTokens,)
    module = "lit_attn.tasks.translation:Translation"
    predicts = ("probabilities", "vocabulary")
    label_smoothing: Share = Field(0.0, description="share of the target spread over other tokens")
    translate_every: PositiveInt | None = Field(
        None, description="epochs between evaluations with BLEU; null: only the last evaluation"
    )
    beams: PositiveInt = Field(5, description="hypotheses that the search follows")
    length_penalty: float = Field(
        1.0, ge=0, description="power of the length that divides a hypothesis's log-probability"
    )
    ratio: float = Field(1.2, ge=0, description="most tokens of a translation per source token")
    extra: PositiveInt = Field(10, description="most tokens beyond `ratio`, without the end")

    def metrics(self, signature: signatures.ParallelTokens) -> tuple[MetricInfo, ...]:
        return (
            MetricInfo("bleu", "BLEU", 100.0, "max"),
            MetricInfo("loss", "loss (nats per token)"),
            MetricInfo("perplexity", "perplexity"),
        )


def _are_measures(names: tuple[str, ...]) -> bool:
    """Return True if `loss` is among the names and each name stands once."""
    return "loss" in names and len(set(names)) == len(names)


class ModuleTaskConfig(OwnClass, Task, kind="module"):
    """A LightningModule of your own (docs/own-tasks.md).

    The class gets the network and `arguments`. Its `training_step` returns the loss, and its
    `validation_step` logs `measures`. The experiment's optimizer and schedule train it.
    """

    takes = (signatures.Signature,)
    runs_foreign_code = True
    base_class = "lightning:LightningModule"

    measures: Annotated[tuple[str, ...], must_be(_are_measures, "'loss', and every name once")] = (
        Field(("loss",), description="names that `validation_step` logs")
    )

    def metrics(self, signature: Any) -> tuple[MetricInfo, ...]:
        metrics = []
        for name in self.measures:
            # The better direction is known for the loss only.
            goal: Goal | None = "min" if name == "loss" else None
            metrics.append(MetricInfo(name, name, goal=goal))
        return tuple(metrics)

    def build(
        self, network: nn.Module, data: Any, loss: Loss, optimizer: Optimizer, rate: Rate
    ) -> Any:
        adapter_class = load("lit_attn.tasks.adapter:Adapter")
        return adapter_class(self, network, data, optimizer, rate)

    def try_out(self, signature: Any) -> None:
        load("lit_attn.tasks.adapter:load_class")(self)
