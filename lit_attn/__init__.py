"""lit_attn: ablations of attention mechanisms that a reviewer believes."""

from typing import Any

__version__ = "0.2.0"

_PUBLIC = {
    "Study": "lit_attn.study:Study",
    "replace_attention": "lit_attn.models.replace:replace_attention",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that `import lit_attn` imports no PyTorch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lit_attn' has no attribute '{name}'")
    from lit_attn.schema.base import load

    return load(_PUBLIC[name])
