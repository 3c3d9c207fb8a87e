"""Published weights of timm's vision transformers, for ours."""

import pickle
from pathlib import Path

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

from lit_attn.schema.errors import ConfigError, suggest


def load_pretrained(vit: VisionTransformer, name: str, checkpoint: str | Path | None) -> None:
    """Load timm's weights `name` into `vit`, from the file `checkpoint` or from timm's hub.

    The positions are resampled to `vit`'s grid (bicubic, as timm does) and the classifier is left
    out. What our attention has beyond the standard layer keeps its initial value, or copies W where
    its part says so. Raises ConfigError where the weights cannot be had or do not fit.
    """
    known = timm.list_pretrained(["vit_*", "deit*"])
    if name not in known:
        raise ConfigError(f"model.pretrained: timm has no weights '{name}'{suggest(name, known)}")
    overlay = None
    if checkpoint is not None:
        # timm's own reader is for the .npz files of the original release alone.
        original = Path(checkpoint).suffix == ".npz"
        overlay = {"file": str(checkpoint), "custom_load": original, "hf_hub_id": None}
    try:
        # On the CPU whatever the caller's default device: the weights are copied over anyway.
        with torch.device("cpu"):
            published = timm.create_model(
                name,
                pretrained=True,
                pretrained_cfg_overlay=overlay,
                num_classes=0,
                img_size=vit.patch_embed.img_size,
            )
        vit.load_state_dict(published.state_dict())
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        source = "timm's hub" if checkpoint is None else str(checkpoint)
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.pretrained: '{name}' cannot be had from {source} "
            f"(model.checkpoint names a local file): {reason[:200]}"
        ) from error
