"""Plug-in for AdamW as fairseq computes it.

The studies of translation name this file under `parts`.

Source: github.com/facebookresearch/fairseq at 3d262bb (fairseq/optim/adam.py; docs/setups.md,
section 16).
"""

from typing import TYPE_CHECKING, Any

from lit_attn.optim.standard import AdamW

if TYPE_CHECKING:
    import torch
    from torch import nn


class FairseqAdam(AdamW, kind="fairseq-adam"):
    """AdamW that adds its epsilon before it corrects the bias of the mean square.

    PyTorch adds it afterwards. Both are equal for an epsilon that is divided by the root of the
    correction.
    """

    runs_foreign_code = False  # Tests try it out, so a dry run need not import PyTorch.

    def build(self, module: "nn.Module", fused: bool = True) -> "torch.optim.Optimizer":
        optimizer = super().build(module, fused)

        def correct(*_: Any) -> None:
            for group in optimizer.param_groups:
                # A checkpoint contains the numbers of the groups, so a resumed cell goes on.
                group["steps"] = group.get("steps", 0) + 1
                group["eps"] = self.eps / (1 - self.betas[1] ** group["steps"]) ** 0.5

        optimizer.register_step_pre_hook(correct)
        return optimizer
