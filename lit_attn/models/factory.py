"""Model factory: builds the network that a model configuration describes."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lit_attn.config.data.base import Data
from lit_attn.config.models.base import Model
from lit_attn.schema.errors import ConfigError


def build(model: Model, data: Data, device: str | torch.device | None = None) -> nn.Module:
    """Return the network of `model` for `data`, initialised except on the meta device.

    Parameters that the code of a model creates without a device are on `device` too. Raises
    ConfigError if the parts of the model do not go together.
    """
    default = contextlib.nullcontext() if device is None else torch.device(device)
    with model_errors(), default:
        network = model.build(data.signature(), device)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model: `build` of kind '{model.kind}' returns {type(network).__name__}, which is not "
            "a torch.nn.Module"
        )
    return network


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Raise the ValueErrors of a model's parts as ConfigErrors that begin with `model`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
