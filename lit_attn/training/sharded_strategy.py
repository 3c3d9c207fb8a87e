"""Lightning's strategy for sharded training: FSDP2, with checkpoints that any strategy can load.

Lightning's own checkpoints of sharded models use torch's `get_state_dict`. That function makes a
step of an optimiser without a state, so a checkpoint before the first step changes the results. It
also takes several optimisers in one for an optimiser without a state. This strategy gathers tensor
by tensor instead and computes nothing. Its files are those of a training without shards.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_attn.models.sharding import gather, load_optimizer, load_weights


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all `world_size` devices; the task shards its network in `configure_model`."""

    def __init__(self, world_size: int) -> None:
        super().__init__(
            data_parallel_size=world_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
        )

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights on rank 0; other ranks have None for sharded tensors."""
        assert self.lightning_module is not None
        weights: dict[str, Any] = gather(self.lightning_module.state_dict(), self.is_global_zero)
        return weights

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the full state on rank 0; other ranks have None for sharded tensors."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state: dict[str, Any] = gather(optimizer.state_dict(), self.is_global_zero)
        return state

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the content of a checkpoint, whose tensors stay in the file until they are read.

        So the ranks of one machine share its memory. No object of another class is created,
        whatever Lightning says about `weights_only`.
        """
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", mmap=True, weights_only=True
        )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=True)
        for optimizer, state in pairs:
            load_optimizer(optimizer, state)
