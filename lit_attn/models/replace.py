"""Names of `lit_attn.replace` under their address of version 0.2, for adapters of users."""

from lit_attn.replace import (
    ADAPTERS,
    UNFIT,
    Adapter,
    Projections,
    build_layer,
    by_head,
    join,
    linear,
    replace_attention,
)

__all__ = [
    "ADAPTERS",
    "UNFIT",
    "Adapter",
    "Projections",
    "build_layer",
    "by_head",
    "join",
    "linear",
    "replace_attention",
]
