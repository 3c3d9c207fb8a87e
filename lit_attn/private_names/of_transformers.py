"""Use of transformers' private names; NAMES in lit_attn.private_names explains each."""

from typing import Any


def has_model(factory: Any, config_class: type) -> bool:
    """Return True if an AutoModel class can build a model for a class of configurations."""
    return config_class in factory._model_mapping


def read_implementation(config: Any) -> str | None:
    """Return the implementation of attention with which a model was loaded, None if unknown."""
    try:
        implementation: str | None = config._attn_implementation
    except AttributeError:
        return None
    return implementation
