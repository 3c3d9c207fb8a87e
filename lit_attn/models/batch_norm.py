"""Batch norms whose statistics are those of the batch on all devices.

PyTorch's SyncBatchNorm needs GPUs. These modules work on every device, so the tests of two
processes on a CPU cover what runs on GPUs.

Shapes: B samples, C channels, (B, C, ...) -> (B, C, ...).
"""

from typing import Any

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce

from lit_attn.attention.precision import wide
from lit_attn.private_names.of_torch import BatchNormBase


class Synchronised(BatchNormBase):
    """Batch norm that, in training on several processes, has the statistics of the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        is_shared = distributed.is_initialized() and distributed.get_world_size() > 1
        if not (self.training and is_shared):
            return super().forward(x)
        return self.finish(self._normalise(x))

    def finish(self, x: Tensor) -> Tensor:
        """Return the output of the module for the output x of the norm."""
        return x

    @torch.compiler.disable
    def _normalise(self, x: Tensor) -> Tensor:
        """Return x normalised over all axes but that of the channels, and over all processes.

        Update the running statistics. Raises ValueError for one value per channel.
        """
        self._check_input_dim(x)
        values = wide(x)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        shape = [1, -1] + [1] * (x.ndim - 2)
        local_count = values.new_full((1,), x.numel() // x.shape[1])
        sums = all_reduce(torch.cat([values.sum(axes), local_count]))
        count = sums[-1].detach()
        if count == 1:
            raise ValueError("a batch norm needs more than 1 value per channel in training")
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        # A second pass, because E(x^2) - E(x)^2 would cancel digits.
        variance = all_reduce(centred.square().sum(axes)) / count
        self._update(mean.detach(), variance.detach() * count / (count - 1))
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards the mean and the unbiased variance of a batch."""
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1 / float(self.num_batches_tracked)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.mul_(1 - share).add_(share * value.to(running.dtype))


class BatchNorm1d(Synchronised, nn.BatchNorm1d):
    """nn.BatchNorm1d over all processes."""


class BatchNorm2d(Synchronised, nn.BatchNorm2d):
    """nn.BatchNorm2d over all processes."""


class BatchNorm3d(Synchronised, nn.BatchNorm3d):
    """nn.BatchNorm3d over all processes."""


class ActivatedBatchNorm2d(Synchronised, BatchNormAct2d):
    """timm's batch norm with an activation, over all processes."""

    def finish(self, x: Tensor) -> Tensor:
        return self.act(self.drop(x))


SYNCHRONISED: dict[type[nn.Module], Any] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    BatchNormAct2d: ActivatedBatchNorm2d,
}
"""Class over all processes by the class of one process."""


def synchronise_batch_norms(network: nn.Module) -> None:
    """Turn the batch norms of `network` into those over all processes, in place.

    Parameters, buffers and state dict stay. Raises ValueError, with the module's path, for other
    modules that keep statistics of a batch, and for a batch norm that has no running statistics.
    """
    for path, module in network.named_modules():
        if isinstance(module, Synchronised):
            continue
        if not _depends_on_batch(module):
            continue
        name = f"{path or 'the model'} ({type(module).__name__})"
        if type(module) not in SYNCHRONISED:
            raise ValueError(
                f"{name} has statistics of a batch, which several devices cannot share; "
                "use nn.BatchNorm2d, a norm of single samples, or `training.devices: 1`"
            )
        if module.running_mean is None:
            raise ValueError(
                f"{name} has no running statistics, so its evaluation depends on the batch and on "
                "the number of devices; set `track_running_stats=True` or `training.devices: 1`"
            )
        module.__class__ = SYNCHRONISED[type(module)]


def _depends_on_batch(module: nn.Module) -> bool:
    """Return True if the training output or the buffers of `module` depend on the batch."""
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
        # Its output is that of single samples, but its running statistics are those of a batch.
        return module.running_mean is not None
    has_statistics = hasattr(module, "running_mean") or hasattr(module, "running_var")
    # A frozen batch norm has statistics, but no momentum with which they change.
    return has_statistics and hasattr(module, "momentum")
