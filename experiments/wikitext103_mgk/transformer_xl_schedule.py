"""Plug-in for the learning rate of Transformer-XL's training script.

MGK's language models use it. Their study names this file under `parts`.

Source: github.com/minhtannguyen/transformer-mgk (docs/setups.md, section 8).
"""

import math

from lit_attn.optim.schedules import End, Schedule, Warmup, count_steps


class TransformerXL(Schedule, kind="transformer-xl"):
    """Per step: the peak at step 0, then linear from 0 to a cosine over all steps, to `end`.

    The script sets the rate after a step. Step s of S has the rate lr s / w for 0 < s < w steps of
    warm-up, and end + (lr - end) (1 + cos(pi s / S)) / 2 from step w on.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.
    warmup: Warmup = 0.0
    end: End = 0.0

    def rate_at(self, step: int, peak: float, steps_per_epoch: int, epochs: int) -> float:
        warmup = count_steps(self.warmup, steps_per_epoch)
        total = steps_per_epoch * epochs
        if 0 < step < warmup:
            return peak * step / warmup
        progress = min(1.0, step / total)
        return self.end + (peak - self.end) * (1 + math.cos(math.pi * progress)) / 2
