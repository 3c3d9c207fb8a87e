"""Rotary embeddings of other libraries in the layout of the layer (lit_attn.attention.rotary).

The layer rotates coordinates j and j + D' / 2 of a head together. Other code may rotate neighbours
2j and 2j + 1: the rows of its projections to q and k are then reordered, which leaves every product
of a query and a key as it is.

Shapes: B batch, n tokens, H heads, H' key heads, D head width, D' coordinates that are rotated.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lit_attn.attention.rotary import Rotary, rotate
from lit_attn.replace.projections import Projections

Angles: TypeAlias = Literal["halves", "neighbours", "once"]
"""Layout of the angles a, b, ... that a model passes: a b a b, a a b b, or a b."""


def pick_angles(values: Tensor, layout: Angles) -> Tensor:
    """Return the cosines or sines (..., D' / 2) of `values`, which have `layout`."""
    if layout == "once":
        return values
    if layout == "neighbours":
        return values[..., ::2]
    return values[..., : values.shape[-1] // 2]


def spread_angles(angles: Tensor, layout: Angles) -> Tensor:
    """Return angles (..., D' / 2) in `layout`."""
    if layout == "once":
        return angles
    if layout == "neighbours":
        return angles.repeat_interleave(2, -1)
    return torch.cat([angles, angles], -1)


def order_of_head(head_dim: int, width: int) -> Tensor:
    """Return the order (D,) of a head's coordinates that turns pairs of neighbours into halves.

    `width` is D'; the coordinates after it are not rotated and stay.
    """
    coordinates = torch.arange(head_dim)
    rotated = coordinates[:width]
    return torch.cat([rotated[::2], rotated[1::2], coordinates[width:]])


def pair_halves(source: Projections, width: int | None = None) -> Projections:
    """Return `source`, whose model rotates neighbours, with rows for the layer's rotation.

    `width` is D', by default D. The modules of `source` are copied.
    """
    key_heads = source.key_heads or source.heads
    head_dim = source.qkv.out_features // (source.heads + 2 * key_heads)
    in_head = order_of_head(head_dim, width or head_dim)
    starts = torch.arange(source.heads + key_heads) * head_dim
    rows = (starts.unsqueeze(1) + in_head).flatten()
    qkv = copy.deepcopy(source.qkv)
    for name, parameter in qkv.named_parameters():
        if name != "v_bias":
            # A bias of the queries alone is as long as their rows.
            rows_of_parameter = rows[: len(parameter)].to(parameter.device)
            parameter[: len(rows_of_parameter)] = parameter[rows_of_parameter]
    norms = []
    for norm in (source.q_norm, source.k_norm):
        norm = copy.deepcopy(norm)
        if norm is not None:
            for parameter in norm.parameters():
                # Weights of one head, or of all heads in turn.
                entries = rows[: parameter.numel()].to(parameter.device)
                parameter.copy_(parameter.flatten()[entries].view_as(parameter))
        norms.append(norm)
    return source._replace(qkv=qkv, q_norm=norms[0], k_norm=norms[1])


class Rotation(NamedTuple):
    """Rotation of queries and keys in the code of a model.

    `pairs_neighbours`: coordinates 2j and 2j + 1 of a head are rotated together, not its halves.
    """

    angles: Angles
    pairs_neighbours: bool


def find_rotation(original: nn.Module) -> Rotation | None:
    """Return how the code of `original` rotates queries and keys, or None if it does not.

    The function of its file is compared with the layer's on a few numbers. Raises ValueError if
    there is no such function, or if it rotates in another way.
    """
    takes_angles = "position_embeddings" in inspect.signature(original.forward).parameters
    if not takes_angles and getattr(original, "rotary_emb", None) is None:
        return None
    code = sys.modules[type(original).__module__]
    rotate_theirs = getattr(code, "apply_rotary_pos_emb", None)
    if rotate_theirs is None:
        raise ValueError("its rotary embedding is computed by code that no adapter knows")
    for pairs_neighbours in (False, True):
        for angles in get_args(Angles):
            if rotates_as(rotate_theirs, angles, pairs_neighbours):
                return Rotation(angles, pairs_neighbours)
    raise ValueError("its rotary embedding pairs other coordinates than Llama's and Cohere's")


def rotates_as(rotate_theirs: Callable[..., Any], layout: Angles, pairs_neighbours: bool) -> bool:
    """Return True if a function of transformers rotates a few numbers in a way that is known."""
    tokens = 3
    width = 8
    # The default device may be meta, where numbers cannot be compared.
    with torch.device("cpu"):
        q = torch.arange(tokens * width, dtype=torch.float32).sin().view(1, 1, tokens, width)
        angles = torch.arange(tokens * width // 2, dtype=torch.float32)
        angles = angles.view(1, tokens, width // 2)
        order = order_of_head(width, width) if pairs_neighbours else torch.arange(width)
        passed = spread_angles(angles, layout)
        ours = rotate(q[..., order], Rotary(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)))
        try:
            theirs = rotate_theirs(q, q, passed.cos(), passed.sin())[0][..., order]
            return torch.allclose(theirs, ours, atol=1e-6)
        except (RuntimeError, IndexError, TypeError):
            # Its angles have another shape, or it has other arguments.
            return False
