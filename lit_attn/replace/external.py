"""Models from elsewhere, with their attention replaced: their base, and modules of a user.

The attention layers are replaced (lit_attn.replace). Initial values are those of the model's
own code, drawn so that variants of one seed share them (lit_attn.models.seeded_draws).
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from pydantic import Field, PositiveInt, field_validator
from torch import nn

from lit_attn import signatures
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from lit_attn.models.base import HiddenWidth, LayerCount, Model
from lit_attn.models.layers import Device
from lit_attn.models.seeded_draws import by_shape
from lit_attn.replace.layer_choice import choose
from lit_attn.replace.replacement import replace_layers
from lit_attn.replace.search import (
    AdapterChoice,
    check_adapted_classes,
    count_layers,
    find_layers,
)
from lit_attn.schema.base import OwnClass
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure, find_user_line

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
    # They describe one network, with an FFN and attention layers of its own.
    own_keys = frozenset({"ffn", "arguments", "adapters", "only", "skip"})

    ffn: ModelFFN = Field(ModelFFN(), description="FFN of every block, always present")
    arguments: dict[str, Any] = Field({}, description="further arguments of the model")
    adapters: dict[str, str] = Field(
        {},
        description="adapter, such as Hub, by class of attention module, such as `net:MyAttention` "
        "(docs/adapters.md)",
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

    def count_layers(self, network: nn.Module) -> LayerCount:
        return count_layers(network, dict[str, AdapterChoice](self.adapters))

    def try_out(self, signature: Any) -> Any:
        try:
            return super().try_out(signature)
        except ValueError as error:
            if find_user_line(error):
                # The caller names the line.
                raise
            raise ConfigError(str(error)) from error


def build_replaced(
    create: Callable[[], nn.Module],
    model: ExternalModel,
    device: Device,
    replaces: bool = True,
) -> nn.Module:
    """Return what `create` returns, on `device`, with replaced attention layers if `replaces`."""
    with torch.device(device or torch.get_default_device()), by_shape():
        network = create()
        if not replaces:
            number_layers(network)
            return network
        adapters = dict[str, AdapterChoice](model.adapters)
        try:
            check_adapted_classes(network, adapters)
            layers = choose(find_layers(network, adapters), model.only, model.skip)
            # The dry run and the record of a cell say how many layers are replaced.
            return replace_layers(network, model.attention, "attention", layers).model
        except ConfigError as error:
            raise ValueError(str(error)) from error


class ModuleConfig(OwnClass, ExternalModel, kind="module"):
    """A module of yours, from a file in `parts` or an installed package.

    It is a class, or a function whose return annotation is a class of modules. It is called with
    `arguments`, and with those of the following that it has as parameters: `attention` (a class
    with the arguments of timm's attention), `ffn_width`, and the fields of the data's signature,
    such as `classes`. Without a parameter `attention`, its self-attention layers are replaced.
    """

    takes = (signatures.Signature,)
    has_own_network = True
    base_class = "torch.nn:Module"
    takes_functions = True

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        self.check(signature)
        return build_module(self, signature, device)


def build_module(model: ModuleConfig, signature: Any, device: Device) -> nn.Module:
    """Return the network that the class or function `model.target` makes."""
    target = model.load()
    parameters = inspect.signature(target).parameters
    offered = {
        field.name: getattr(signature, field.name) for field in dataclasses.fields(signature)
    }
    offered["signature"] = signature
    if "attention" in parameters:
        for key in ("only", "skip"):
            if getattr(model, key) is not None:
                raise ValueError(
                    f"{key}: {model.target} builds its layers from its parameter `attention`, so "
                    f"none is replaced; remove {key}"
                )
        if model.attention.layers is not None:
            raise ValueError(
                f"attention.layers: {model.target} builds all layers from its parameter "
                "`attention`; without this parameter its layers are replaced, and can differ"
            )
        offered["attention"] = attn_layer(model.attention)
    if model.ffn.width is not None:
        if "ffn_width" not in parameters:
            raise ValueError(
                f"ffn.width: {model.target} has no parameter `ffn_width`; "
                "add one, or set `match: none` in the study"
            )
        offered["ffn_width"] = model.ffn.width
    arguments = {key: value for key, value in offered.items() if key in parameters}
    arguments |= model.arguments
    builds_attention = "attention" in parameters

    def create() -> Any:
        try:
            network = target(**arguments)
        except Exception as error:
            # Code of a user can raise any exception.
            raise ValueError(explain_failure(error, f"arguments: {model.target}")) from error
        if not isinstance(network, nn.Module):
            raise ValueError(f"import: {model.target} makes {type(network).__name__}, no nn.Module")
        return network

    return build_replaced(create, model, device, replaces=not builds_attention)
