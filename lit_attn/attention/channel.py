"""Channels of a network: tensors that one layer writes and later layers of the same pass read."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_attn.private_names.of_torch import is_in_backward


class Channel:
    """Tensors that one layer of a network writes in each forward pass, for later layers.

    Copies of a network, and saved networks, have a channel without tensors.
    """

    key: ClassVar[str]
    """Key of the specification with which layers read the channel; it begins messages."""
    source: ClassVar[str]
    """The layer that writes, as messages name it."""
    content: ClassVar[str]
    """Noun for the tensors that the layer writes, as messages name them."""
    tensors: tuple[Tensor, ...] | None = None
    open_passes = 0
    """Forward passes whose gradients have not reached the writing layer yet."""
    has_graph = True
    """False if the tensors were computed without gradients."""

    def __getstate__(self) -> dict[str, Any]:
        """Return no state: tensors of a running pass belong to no copy."""
        return {}

    def write(self, *tensors: Tensor) -> None:
        """Store the tensors of a new forward pass."""
        self.tensors = tensors
        self.has_graph = torch.is_grad_enabled()
        if torch.compiler.is_compiling() or is_in_backward():
            return
        if tensors[-1].requires_grad:
            self.open_passes += 1
            tensors[-1].register_hook(self._close_passes)

    def _close_passes(self, gradient: Tensor) -> None:
        """Note that all later layers have their gradients."""
        self.open_passes = 0

    def take(self) -> tuple[Tensor, ...]:
        """Return the tensors of the running forward pass.

        Raises RuntimeError if no layer has written them, if activation checkpointing computes a
        layer again after a later forward pass, whose tensors are stored now, and if it is
        re-entrant, which computes the tensors without gradients at first.
        """
        if self.tensors is None:
            raise RuntimeError(
                f"{self.key}: the {self.source} of the network has not computed its "
                f"{self.content}; call the complete network"
            )
        if torch.compiler.is_compiling() or not is_in_backward():
            return self.tensors
        if not self.has_graph:
            raise RuntimeError(
                f"{self.key}: re-entrant activation checkpointing computes the {self.content} of "
                f"the {self.source} without gradients; use checkpoints with `use_reentrant=False`"
            )
        if self.open_passes > 1:
            raise RuntimeError(
                f"{self.key}: activation checkpointing computes a layer of an earlier forward pass "
                f"again, and the {self.content} of its {self.source} are replaced; call backward "
                "after each forward pass"
            )
        return self.tensors
