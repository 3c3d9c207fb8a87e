"""Function that stops a cell during training."""

import os
import signal
from typing import Any

import lightning as L
import pytest

from lit_attn.training.recording import Progress


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM to this process when training has completed `step` steps."""
    original = Progress.on_train_batch_end

    def stopping(self: Any, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "on_train_batch_end", stopping)
