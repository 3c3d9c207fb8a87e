"""Models of timm, with their attention replaced."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from lit_attn import signatures
from lit_attn.models.base import require_one_size
from lit_attn.models.factory import count
from lit_attn.models.layers import Device
from lit_attn.replace.external import ExternalModel, build_replaced
from lit_attn.replace.ffn_resize import resize_ffns
from lit_attn.schema.base import outside_identity
from lit_attn.schema.errors import suggest


class TimmConfig(ExternalModel, kind="timm"):
    """Any image model of timm with softmax self-attention."""

    takes = (signatures.ImageLabels, signatures.ImageTargets)
    name: str = Field(description="timm's name of the model")
    pretrained: bool = Field(False, description="start from timm's weights of this name")
    checkpoint: Path | None = outside_identity(None, "file of these weights; null: timm's download")

    def check(self, signature: Any) -> None:
        require_one_size(self.kind, signature)
        if self.checkpoint is not None and not self.pretrained:
            raise ValueError("checkpoint: needs `pretrained: true`")

    def build(self, signature: Any, device: Device = None) -> nn.Module:
        self.check(signature)
        return build_timm(self, signature, device)


def build_timm(model: TimmConfig, signature: Any, device: Device) -> nn.Module:
    """Return timm's model for images of the signature's size; raise ValueError if it has none."""
    channels, *size = signature.shape
    options = {"num_classes": signature.outputs, "in_chans": channels} | model.arguments
    width = model.ffn.width
    ratio = {} if width is None else find_ratio(model, size, options, width)
    has_ratio = bool(ratio)

    def create() -> nn.Module:
        is_loaded = model.pretrained and torch.empty(0).device.type != "meta"
        network: nn.Module = create_timm(
            model.name, size, options | ratio, is_loaded, model.checkpoint
        )
        if width is not None and not has_ratio:
            resize_ffns(network, width)
        return network

    return build_replaced(create, model, device)


def find_ratio(
    model: TimmConfig, size: Any, options: dict[str, Any], width: int
) -> dict[str, float]:
    """Return timm's argument for FFNs of `width` hidden units in the first stage.

    The result is empty if the constructor has no such argument; `resize_ffns` then changes the
    FFNs. Raises ValueError if pretrained weights have another width.
    """
    from timm.models.maxxvit import MaxxVit

    with torch.device("meta"):
        original = create_timm(model.name, size, options)
        # Counted before `resize_ffns` changes it.
        original_count = count(original)
        name = "transformer_expand_ratio" if type(original) is MaxxVit else "mlp_ratio"
        # A little more than the width, because timm rounds the product with the ratio down.
        ratio = {name: (width + 1e-6) / original.feature_info[0]["num_chs"]}
        try:
            matched = create_timm(model.name, size, options | ratio)
        except ValueError:
            ratio = {}
            matched = resize_ffns(original, width)
        if model.pretrained and count(matched) != original_count:
            raise ValueError("ffn.width: pretrained weights have another width; set `match: none`")
    return ratio


def create_timm(
    name: str,
    size: Any,
    options: dict[str, Any],
    pretrained: bool = False,
    checkpoint: str | Path | None = None,
) -> Any:
    """Return timm's model `name` for images of `size` (H, W), if it depends on the size.

    Pretrained weights come from the file `checkpoint` or from timm's hub. Raises ValueError for an
    unknown name, an unknown option, or weights that cannot be loaded.
    """
    import timm

    if not timm.is_model(name):
        raise ValueError(f"name: '{name}' is not a timm model{suggest(name, timm.list_models())}")
    overlay = None
    if checkpoint is not None:
        # timm's own reader is only for the .npz files of the original release.
        is_original_release = Path(checkpoint).suffix == ".npz"
        overlay = {
            "file": str(checkpoint),
            "custom_load": is_original_release,
            "hf_hub_id": None,
        }
    create = partial(timm.create_model, name, pretrained, pretrained_cfg_overlay=overlay, **options)
    try:
        try:
            return create(img_size=tuple(size))
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create()
    except (AssertionError, TypeError) as error:
        raise ValueError(f"arguments: '{name}': {error}") from error
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        if not pretrained:
            raise
        source = "timm's hub" if checkpoint is None else str(checkpoint)
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"pretrained: cannot load '{name}' from {source}: {reason}; "
            "`checkpoint` can name a local file"
        ) from error
