"""Models from elsewhere, with their attention replaced: timm, transformers, and own modules."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import Field, PositiveInt, field_validator

from lit_attn import signatures
from lit_attn.models.base import HiddenWidth, Model, require_one_size
from lit_attn.schema.base import OwnClass, consistency_check, load, outside_identity
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import find_user_line

if TYPE_CHECKING:
    import torch
    from torch import nn


LayerChoice: TypeAlias = int | str | tuple[int | str, ...] | None
"""A path, a pattern or an index of attention layers, a list of these, or None for no choice."""


class ModelFFN(HiddenWidth):
    """Feed-forward network of a model from elsewhere."""

    width: PositiveInt | None = Field(
        None,
        description="hidden units in the first stage; null: those of the model; "
        "`match: parameters` solves for them",
    )


class ExternalModel(Model):
    """Base of the models from elsewhere (docs/own-models.md)."""

    runs_foreign_code = True
    builder: ClassVar[str]
    """Function that builds the model."""
    builder_file: ClassVar[str] = "lit_attn.models.external"
    """Module with this function, which imports PyTorch."""

    ffn: ModelFFN = Field(ModelFFN(), description="FFN of every block, always present")
    arguments: dict[str, Any] = Field({}, description="further arguments of the model")
    adapters: dict[str, str] = Field(
        {},
        description="adapter, such as Hub, by class of attention module, such as `net:MyAttention` "
        "(docs/own-models.md)",
    )

    only: LayerChoice = Field(
        None,
        description="attention layers to replace: a path or pattern such as `blocks.*.attn`, an "
        "index such as -1, or a list of these; null: all",
    )
    skip: LayerChoice = Field(
        None, description="attention layers that remain as they are, written as in `only`"
    )

    @field_validator("adapters")
    @classmethod
    def _names_adapters(cls, value: dict[str, str]) -> dict[str, str]:
        for module_class, adapter in value.items():
            if ":" in adapter:
                raise ValueError(
                    f"'{adapter}' for '{module_class}' is no name of an adapter; write a name such "
                    "as Hub, or add a class of your own to ADAPTERS in a file in `parts`"
                )
        return value

    @field_validator("ffn", mode="before")
    @classmethod
    def _keeps_its_ffn(cls, value: Any) -> Any:
        """Refuse the words that stand for no FFN."""
        if value in (None, "none", "without"):
            raise ValueError("a model from elsewhere cannot do without its FFN; remove `ffn`")
        return value

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        self.check(signature)
        build_model = load(f"{self.builder_file}:{self.builder}")
        return build_model(self, signature, device)

    def try_out(self, signature: Any) -> Any:
        try:
            return super().try_out(signature)
        except ValueError as error:
            if find_user_line(error):
                # The caller names the line.
                raise
            raise ConfigError(str(error)) from error


class TimmConfig(ExternalModel, kind="timm"):
    """Any image model of timm with softmax self-attention."""

    takes = (signatures.ImageLabels, signatures.ImageTargets)
    builder = "build_timm"
    name: str = Field(description="timm's name of the model")
    pretrained: bool = Field(False, description="start from timm's weights of this name")
    checkpoint: Path | None = outside_identity(None, "file of these weights; null: timm's download")

    def check(self, signature: Any) -> None:
        require_one_size(self.kind, signature)
        if self.checkpoint is not None and not self.pretrained:
            raise ValueError("checkpoint: needs `pretrained: true`")


class TransformersConfig(ExternalModel, kind="transformers"):
    """A model of transformers with random weights (`architecture`) or pretrained ones (`name`).

    Data set the number of classes, the vocabulary, the positions and the image size. The class for
    image, sequence or token classification, or language modelling, follows from them.
    """

    takes = (*TimmConfig.takes, signatures.PaddedTokens, signatures.CausalTokens)
    builder = "build_transformers"
    architecture: str | None = Field(
        None, description="model type with random weights, such as llama; `arguments` are its keys"
    )
    name: str | None = Field(
        None, description="folder or hub name of pretrained weights, such as openai-community/gpt2"
    )

    def check(self, signature: Any) -> None:
        if getattr(signature, "pairs", False):
            raise ValueError(f"'{self.kind}' does not take pairs of sequences")
        if hasattr(signature, "shape"):
            require_one_size(self.kind, signature)

    def exempt_parameters(self) -> tuple[str, ...]:
        return ("positions",)

    @consistency_check
    def _has_one_source(self) -> None:
        """Refuse a model with both or none of architecture and name."""
        if (self.architecture is None) == (self.name is None):
            raise ValueError("needs either `architecture` or `name`")


class ModuleConfig(OwnClass, ExternalModel, kind="module"):
    """A module of yours, from a file in `parts` or an installed package.

    It is a class, or a function whose return annotation is a class of modules. It is called with
    `arguments`, and with those of the following that it has as parameters: `attention` (a class
    with the arguments of timm's attention), `ffn_width`, and the fields of the data's signature,
    such as `classes`. Without a parameter `attention`, its self-attention layers are replaced.
    """

    takes = (signatures.Signature,)
    builder = "build_module"
    base_class = "torch.nn:Module"
    takes_functions = True
