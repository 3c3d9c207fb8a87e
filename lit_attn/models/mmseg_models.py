"""Builder of the models in configuration files of mmsegmentation.

mmsegmentation's registry builds the model, mmengine draws its initial values, and
`replace_attention` replaces the attention of backbone and heads.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmseg.models import EncoderDecoder
from mmseg.registry import MODELS
from torch import nn
from torch.overrides import TorchFunctionMode

from lit_attn.models.external import build_replaced
from lit_attn.models.ffn_resize import CHANNELS, INPUTS, OUTPUTS, resize_layer
from lit_attn.models.layers import Device
from lit_attn.models.mmseg_config import MMSegConfig
from lit_attn.models.mmseg_preprocessor import Preprocessor
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.plugins import explain_failure, require_trust
from lit_attn.signatures import ImageMasks

SCOPES = ("mmcv", "mmengine", "mmseg")
"""Scopes in names such as `mmseg.VisionTransformer`."""


def build_mmseg(model: MMSegConfig, signature: ImageMasks, device: Device) -> nn.Module:
    """Return mmsegmentation's EncoderDecoder for windows of the signature's shape.

    Raises ValueError, which begins with the key, for a `model` that mmsegmentation cannot build, or
    that the segmentation task cannot train.
    """
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


def build_network(content: dict[str, Any]) -> EncoderDecoder:
    """Return the network that mmsegmentation's registry builds from `content`.

    Raises ConfigError if it is no EncoderDecoder.
    """
    with warnings.catch_warnings(), default_scope(), LinspaceOnCPU():
        # Windows and positions of some backbones call it as in earlier versions of PyTorch.
        warnings.filterwarnings("ignore", message="torch.meshgrid")
        # The divisor of the loss is the choice of the file.
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        network = MODELS.build(ConfigDict(content))
    if not isinstance(network, EncoderDecoder):
        raise ConfigError(f"type {type(network).__name__} is no EncoderDecoder")
    return network


def initialise(network: EncoderDecoder) -> None:
    """Draw the initial values, or load weights, as the `init_cfg` of each module says."""
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


def resize_ffns(network: EncoderDecoder, width: int, is_pretrained: bool) -> None:
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
