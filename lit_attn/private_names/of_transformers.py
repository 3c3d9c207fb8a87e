"""Use of transformers' private names; NAMES in lit_attn.private_names explains each."""

from typing import Any


def has_model(factory: Any, config_class: type) -> bool:
    """Return True if an AutoModel class can build a model for a class of configurations."""
    return config_class in factory._model_mapping
