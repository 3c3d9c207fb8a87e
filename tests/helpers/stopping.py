"""Functions that stop a cell during training and read its weights."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lit_attn.training.recording import Progress


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "weights.pt", weights_only=True)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM to this process when training has completed `step` steps."""
    original = Progress.on_train_batch_end

    def stopping(self: Any, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "on_train_batch_end", stopping)
