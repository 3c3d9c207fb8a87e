"""Use of transformers' private names; NAMES in lit_attn.private_names explains each."""

from typing import Any


def read_implementation(config: Any) -> str | None:
    """Return the implementation of attention with which a model was loaded, None if unknown."""
    try:
        implementation: str | None = config._attn_implementation
    except AttributeError:
        return None
    return implementation
