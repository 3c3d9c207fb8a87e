"""Functions that stop a cell during training."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lit_attn.cells.failure import Preempted
from lit_attn.train import run_cell
from lit_attn.training.recording import Progress


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM to this process when training has completed `step` steps."""
    original = Progress.on_train_batch_end

    def stopping(self: Any, trainer: L.Trainer, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        if trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "on_train_batch_end", stopping)


def run_until(step: int, folder: Path) -> None:
    """Train a cell until SIGTERM stops it after `step` steps, where it must save a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, step)
        with pytest.raises(Preempted, match=f"saved at step {step}$"):
            run_cell(folder)
