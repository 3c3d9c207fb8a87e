"""Models from configuration files of mmsegmentation, with their attention replaced."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from lit_attn.extras import require, require_mmseg
from lit_attn.models.external_config import ExternalModel
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import key_error
from lit_attn.schema.plugins import run_import
from lit_attn.signatures import ImageMasks

if TYPE_CHECKING:
    import torch
    from torch import nn

HEADS = ("decode_head", "auxiliary_head")
"""Keys of mmsegmentation's `model` with one head or a list of heads."""


class MMSegConfig(ExternalModel, kind="mmseg"):
    """The `model` of a configuration file of mmsegmentation, with its attention replaced.

    Losses, auxiliary heads, normalisation and inference (whole images or sliding windows) are those
    of the file. The file is code, and is read when the study is read; a cell contains its `model`.
    """

    takes = (ImageMasks,)
    builder = "build_mmseg"
    builder_file = "lit_attn.models.mmseg_models"

    config: Path | None = outside_identity(None, "configuration file of mmsegmentation")
    resolved: dict[str, Any] = Field(
        {}, description="`model` of the file; read from `config`, and written to a cell"
    )

    @classmethod
    def name_code(cls, written: dict[Any, Any]) -> dict[str, Any]:
        # The types in `model` are names that mmsegmentation's registry can import.
        return {key: written[key] for key in ("config", "resolved") if key in written}

    @model_validator(mode="before")
    @classmethod
    def _read_file(cls, value: Any) -> Any:
        """Read `config`, unless the mapping is that of a cell, which contains `resolved`."""
        if not isinstance(value, dict) or value.get("resolved"):
            return value
        path = value.get("config")
        if not isinstance(path, str | Path):
            raise key_error("config", "needs a configuration file of mmsegmentation")
        try:
            resolved = read_network(Path(path))
        except ValueError as error:
            raise key_error("config", str(error)) from error
        return {**value, "resolved": resolved}

    @consistency_check
    def _has_no_arguments(self) -> None:
        """Refuse `arguments`, because the file has all of them."""
        if self.arguments:
            raise ValueError("arguments: this model has none; change the file in `config`")

    def check(self, signature: ImageMasks) -> None:
        for key, head in list_heads(self.resolved):
            count = head.get("num_classes")
            if count != signature.classes:
                raise ValueError(
                    f"config: {key}.num_classes is {count}, but the data have {signature.classes} "
                    f"classes; write {key}.num_classes = {signature.classes} in the file"
                )
            label = head.get("ignore_index", signature.ignore)
            if label != signature.ignore:
                raise ValueError(
                    f"config: {key}.ignore_index is {label}, but pixels without a class have the "
                    f"label {signature.ignore}; remove ignore_index from the file"
                )
        preprocessor = self.resolved.get("data_preprocessor")
        if not isinstance(preprocessor, dict):
            raise ValueError(
                "config: model has no data_preprocessor; add one of type SegDataPreProcessor"
            )
        crop = list(signature.shape[1:])
        size = preprocessor.get("size")
        if size is not None and size != crop:
            raise ValueError(
                f"config: data_preprocessor.size is {size}, but training windows are {crop}; "
                f"set data.crop or change the file"
            )

    def build(self, signature: Any, device: "torch.device | str | None" = None) -> "nn.Module":
        require_mmseg("model.kind")
        return super().build(signature, device)


def list_heads(network: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the mapping of each head of mmsegmentation's `model`."""
    for name in HEADS:
        heads = network.get(name)
        if isinstance(heads, dict):
            yield name, heads
        elif isinstance(heads, list):
            for index, head in enumerate(heads):
                yield f"{name}[{index}]", head


def read_network(path: Path) -> dict[str, Any]:
    """Return the `model` of a configuration file of mmsegmentation as plain values.

    The file is executed if it is Python. Raises ValueError if it is missing, cannot be read, or has
    no usable `model`; ConfigError if mmengine is not installed.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}")
    config_class = require("mmengine.config", "model.kind", "segmentation").Config
    try:
        content = run_import(
            lambda: config_class.fromfile(path, import_custom_modules=False).to_dict(), path
        )
    except ValueError as error:
        message = str(error)
        # A mistake in the syntax has no file, because mmengine parses the text.
        is_named = path.name in message
        raise ValueError(message if is_named else f"{path}: {message}") from error
    if content.get("custom_imports"):
        raise ValueError(
            f"{path} has `custom_imports`, which a cell would not import; remove them, and "
            "name the files of your modules in `parts` of the study"
        )
    network = content.get("model")
    if not isinstance(network, dict):
        raise ValueError(
            f"{path} has no `model`; name a complete configuration of mmsegmentation, "
            "with backbone and decode_head"
        )
    for name in ("backbone", "decode_head"):
        if name not in network:
            raise ValueError(f"{path}: model has no {name}")
    try:
        # A cell is written as JSON, which has lists and no tuples.
        plain: dict[str, Any] = json.loads(json.dumps(network, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: model must contain numbers, texts, lists and mappings only: {error}"
        ) from error
    return plain
