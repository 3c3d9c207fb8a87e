"""Loading of a standard layer's weights into a layer with further parts."""

from typing import Any

from torch import Tensor

# Names of the children that the standard layer does not have.
EXTRA = (
    "bias",
    "composers",
    "convolution",
    "filter",
    "gate",
    "normaliser",
    "pair",
    "residual",
    "scale",
    "similarity",
    "transform",
    "values",
    "z",
    "z_norm",
)


def complete_standard_weights(
    layer: Any, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Complete the weights of a standard layer in `state`, so that any layer can load them.

    If `state` has W but none of the layer's further parameters, these keep their initial values, or
    become a copy of W if the residual part says so.
    """
    initial = layer.state_dict()
    extra = {name for name in initial if name.split(".")[0] in EXTRA}
    has_projection = prefix + "proj.weight" in state
    has_extra = any(prefix + name in state for name in extra)
    if not has_projection or has_extra:
        return
    for name in extra:
        state[prefix + name] = initial[name]
    projection = {name: state[prefix + "proj." + name] for name in layer.proj.state_dict()}
    copied = layer.residual.initial_state(projection)
    for name, value in copied.items():
        state[f"{prefix}residual.{name}"] = value
