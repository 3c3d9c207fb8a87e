"""Models from configuration files of mmsegmentation, with their attention replaced.

mmsegmentation's registry builds the model, mmengine draws its initial values, and
`replace_attention` replaces the attention of backbone and heads. Functions import mmsegmentation,
because it is optional.
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field, model_validator
from torch import nn
from torch.overrides import TorchFunctionMode

from lit_attn.extras import require, require_mmseg
from lit_attn.models.layers import Device
from lit_attn.replace.external import ExternalModel, build_replaced
from lit_attn.replace.ffn_resize import CHANNELS, INPUTS, OUTPUTS, resize_layer
from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.schema.errors import ConfigError, key_error
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.plugins import explain_failure, run_import
from lit_attn.schema.trust import require_trust
from lit_attn.signatures import ImageMasks

if TYPE_CHECKING:
    from mmseg.models import EncoderDecoder

HEADS = ("decode_head", "auxiliary_head")
"""Keys of mmsegmentation's `model` with one head or a list of heads."""

SCOPES = ("mmcv", "mmengine", "mmseg")
"""Scopes in names such as `mmseg.VisionTransformer`."""


class MMSegConfig(ExternalModel, kind="mmseg"):
    """The `model` of a configuration file of mmsegmentation, with its attention replaced.

    Losses, auxiliary heads, normalisation and inference (whole images or sliding windows) are those
    of the file. The file is code, and is read when the study is read; a cell contains its `model`.
    """

    takes = (ImageMasks,)

    config: Path | None = outside_identity(None, "configuration file of mmsegmentation")
    resolved: dict[str, Any] = Field(
        {}, description="`model` of the file; read from `config`, and written to a cell"
    )

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

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        require_mmseg("model.kind")
        self.check(signature)
        return build_mmseg(self, signature, device)


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


def build_mmseg(model: MMSegConfig, signature: ImageMasks, device: Device) -> nn.Module:
    """Return mmsegmentation's EncoderDecoder for windows of the signature's shape.

    Raises ValueError, which begins with the key, for a `model` that mmsegmentation cannot build, or
    that the segmentation task cannot train.
    """
    from lit_attn.segmentation.mmseg_preprocessor import Preprocessor

    # Its types are names that mmsegmentation's registry imports.
    require_trust("resolved")
    width = model.ffn.width
    content = clean_types(model.resolved)
    preprocessor = content["data_preprocessor"]
    is_standard = preprocessor.get("type") == "SegDataPreProcessor"
    if is_standard and preprocessor.get("mean") is not None:
        preprocessor["type"] = Preprocessor

    def create() -> nn.Module:
        is_meta = torch.empty(0).device.type == "meta"
        try:
            network = build_network(content)
            if not is_meta:
                initialise(network)
        except Exception as error:
            # mmsegmentation asserts its conditions, and raises any exception for a wrong argument.
            raise ValueError(f"config: {explain_failure(error, 'mmsegmentation')}") from error
        if network.out_channels != signature.classes:
            raise ValueError(
                f"config: decode_head has {network.out_channels} outputs for {signature.classes} "
                "classes; the segmentation task needs one output for each class"
            )
        if width is not None:
            resize_ffns(network, width, has_pretrained_weights(content))
        return network

    return build_replaced(create, model, device)


def build_network(content: dict[str, Any]) -> "EncoderDecoder":
    """Return the network that mmsegmentation's registry builds from `content`.

    Raises ConfigError if it is no EncoderDecoder.
    """
    from mmengine.config import ConfigDict
    from mmseg.models import EncoderDecoder
    from mmseg.registry import MODELS

    with warnings.catch_warnings(), default_scope(), LinspaceOnCPU():
        # Windows and positions of some backbones call it as in earlier versions of PyTorch.
        warnings.filterwarnings("ignore", message="torch.meshgrid")
        # The divisor of the loss is the choice of the file.
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        network = MODELS.build(ConfigDict(content))
    if not isinstance(network, EncoderDecoder):
        raise ConfigError(f"type {type(network).__name__} is no EncoderDecoder")
    return network


def initialise(network: "EncoderDecoder") -> None:
    """Draw the initial values, or load weights, as the `init_cfg` of each module says."""
    from mmengine.logging import MMLogger

    logger = MMLogger.get_current_instance()
    level = logger.level
    # mmengine would log a line for each parameter.
    logger.setLevel(logging.WARNING)
    try:
        with default_scope():
            network.init_weights()
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def default_scope() -> Iterator[None]:
    """Let mmengine search mmsegmentation's registries first, as its Runner does."""
    from mmengine.registry import DefaultScope

    with DefaultScope.overwrite_default_scope("mmseg"):
        yield


class LinspaceOnCPU(TorchFunctionMode):
    """Mode in which `torch.linspace` returns its values, also on the meta device.

    The backbones of mmsegmentation compute their drop-path rates with it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.linspace:
            options.setdefault("device", "cpu")
        return func(*args, **options)


def clean_types(value: Any) -> Any:
    """Return a copy of `value` whose types are names in registries, or classes of modules.

    mmengine imports a type with a dot and calls it, and `os.system` would be such a type. Raises
    ConfigError if it is no class that derives from torch.nn.Module. Norms over several devices
    become plain ones, because this package makes them norms over all devices itself.
    """
    if isinstance(value, list):
        return [clean_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    cleaned = {key: clean_types(item) for key, item in value.items()}
    name = cleaned.get("type")
    if isinstance(name, str):
        scope, _, rest = name.partition(".")
        if scope in SCOPES and "." not in rest:
            name = rest or name
        if "." in name:
            module_name, _, class_name = name.rpartition(".")
            cleaned["type"] = import_class(f"{module_name}:{class_name}", "torch.nn:Module")
        else:
            cleaned["type"] = "BN" if name == "SyncBN" else name
    return cleaned


def has_pretrained_weights(value: Any) -> bool:
    """Return True if a part of `value` names weights that its initialisation loads."""
    if isinstance(value, list):
        return any(has_pretrained_weights(item) for item in value)
    if not isinstance(value, dict):
        return False
    if value.get("type") == "Pretrained" or value.get("pretrained") is not None:
        return True
    return any(has_pretrained_weights(item) for item in value.values())


def is_ffn(module: nn.Module) -> bool:
    """Return True if `module` has what the FFNs of mmcv and of mmsegmentation have."""
    return hasattr(module, "feedforward_channels") and hasattr(module, "layers")


def resize_ffns(network: "EncoderDecoder", width: int, is_pretrained: bool) -> None:
    """Resize the FFNs of the backbone by one factor, so that the first has `width` hidden units.

    An FFN of mmcv or mmsegmentation is a sequence of linear layers or convolutions of 1 x 1 pixels,
    with a depthwise convolution between the two in MixVisionTransformer. New parameters are drawn
    from the initial values of the old ones. Raises ValueError if the backbone has no FFN, or if
    pretrained weights have another width.
    """
    ffns: list[Any] = [module for module in network.backbone.modules() if is_ffn(module)]
    if not ffns:
        raise ValueError("ffn.width: its backbone has no FFN of mmcv; set `match: none`")
    original = ffns[0].feedforward_channels
    if width == original:
        return
    if is_pretrained:
        raise ValueError("ffn.width: pretrained weights have another width; set `match: none`")
    for ffn in ffns:
        hidden = max(1, round(width / original * ffn.feedforward_channels))
        layers = [m for m in ffn.layers.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        first, *between, last = layers
        resize_layer(first, 0, hidden, OUTPUTS)
        for convolution in between:
            resize_layer(convolution, 0, hidden, CHANNELS)
        resize_layer(last, 1, hidden, INPUTS)
        ffn.feedforward_channels = hidden
