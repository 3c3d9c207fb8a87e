"""Plug-in for a cosine that starts late: the schedule of DeiT and of ViT-small on CIFAR.

Studies on cifar10_vit_small.yaml, cifar100_vit_small.yaml and imagenet_local_vit.yaml name this
file under `parts`.

Sources: github.com/kentaroy47/vision-transformers-cifar10 (docs/setups.md, section 1) and
github.com/BorealisAI/efficient-vit-training (section 5).
"""

import math

from pydantic import Field, NonNegativeInt

from lit_attn.config.schedules import End, Schedule


class LaggedCosine(Schedule, kind="lagged-cosine"):
    """Per epoch e: end + (lr - end) (1 + cos(pi (e - lag) / epochs)) / 2, and the peak in epoch 0.

    A set-up that calls its schedule with `epoch` after the epoch lags by one (DeiT); the set-up of
    ViT-small on CIFAR calls it with epoch - 1 and lags by two.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    lag: NonNegativeInt = Field(2, description="epochs by which the cosine lags")
    end: End = 0.0

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        epoch = step // steps_per_epoch
        # Epoch 0 runs before the first call. The argument of epoch 1 is negative: cos(-x) = cos(x).
        if epoch == 0:
            return peak
        share = (1 + math.cos(math.pi * (epoch - self.lag) / epochs)) / 2
        return self.end + (peak - self.end) * share
