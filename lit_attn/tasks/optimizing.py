"""Updates of the weights of a task: the optimiser, its constants, clipping, and recorded steps."""

from abc import ABC, abstractmethod
from typing import Any

import lightning as L
import torch
from torch import Tensor, distributed, nn

from lit_attn.attention.statistics import Learner, find_learners, leave_steps_to_loop
from lit_attn.models.sharding import is_sharded
from lit_attn.optim.base import Optimizer
from lit_attn.optim.schedules import Rate, set_constants


class OptimizedModule(L.LightningModule, ABC):
    """Module whose `network` is trained by `optimizer`, with the learning rate `rate` of a step."""

    momentum: Rate | None = None
    """Momentum (Adam's beta1) of each step; None if the optimiser's own is kept."""

    decay_factor: Rate | None = None
    """Factor of the weight decay in each step; None if the optimiser's own is kept."""

    def __init__(self, network: nn.Module, optimizer: Optimizer, rate: Rate) -> None:
        super().__init__()
        self.network = network
        leave_steps_to_loop(network)
        self.optimizer = optimizer
        self.rate = rate
        # Parts that learn from statistics, from the first step on.
        self.learners: list[Learner] | None = None
        # Parameters whose gradients are clipped, from the first step on.
        self.clipped: list[nn.Parameter] | None = None

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the training loss of one batch, a scalar."""

    @abstractmethod
    def record_training(self, name: str, values: Tensor) -> None:
        """Add values of training samples, of any shape, to the mean of the epoch `train/NAME`."""

    @property
    @abstractmethod
    def makes_steps(self) -> bool:
        """True if the training step also computes gradients and steps the optimiser."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser; `on_before_optimizer_step` sets its learning rate."""
        # A fused optimiser removes the loss scale itself, which is too late for clipping.
        has_loss_scale = self.trainer.precision == "16-mixed"
        is_clipping = self.trainer.gradient_clip_val is not None
        is_fused = not (has_loss_scale and is_clipping)
        if is_sharded(self.network):
            # The loss scale is no sharded tensor, as the parameters are.
            is_fused = self.optimizer.fuses_shards and not has_loss_scale
        return self.optimizer.build(self.network, fused=is_fused)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Scale the gradients of all parameters to a joint norm of at most `gradient_clip_val`."""
        # Lightning's own method rejects fused optimisers in bf16 too, where there is no loss scale.
        if gradient_clip_val is not None:
            if self.clipped is None:
                # Python needs longer to go through the modules of a deep network than to clip.
                self.clipped = list(self.parameters())
            self.optimizer.clip(self.clipped, gradient_clip_val)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        factors = (self.rate, self.momentum, self.decay_factor)
        set_constants(optimizer.param_groups, self.global_step, *factors)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Step the optimiser, then the parts that learn from statistics of the whole batch.

        If the module `makes_steps`, its training step has done both.
        """
        if self.makes_steps:
            optimizer_closure()
            return
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.end_learning_step()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.makes_steps:
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if not self.makes_steps:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def end_learning_step(self) -> None:
        """End a step of the parts that learn from statistics of the whole batch."""
        all_reduce = distributed.all_reduce if self.trainer.world_size > 1 else None
        if self.learners is None:
            # A search in each step would be a large part of what a step adds to a plain loop.
            self.learners = find_learners(self.network)
        for part in self.learners:
            part.end_step(all_reduce)
