"""Use of Lightning's private names; NAMES in lit_attn.private_names explains each."""

from typing import Any

from lightning.fabric.utilities.logger import _flatten_dict, _sanitize_params


def flatten_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return nested settings as one level with the values that TensorBoard's HPARAMS tab takes."""
    return _sanitize_params(_flatten_dict(settings))
