"""Checkpoints from which a cell goes on as if it had never stopped."""

import os
import pickle
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import nn

from lit_attn.errors import Preempted

KEEP = 2

# What torch.load raises on a file cut short, zeroed or overwritten.
UNREADABLE = (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


class Checkpoints(L.Callback):
    """Saves the whole training state every `interval` seconds, at any step but an epoch's last.

    The newest two are kept: one may be cut short by a crash that a rename does not protect from, a
    lying disk for instance. SIGTERM saves once more and raises Preempted. Every step's random
    numbers are seeded from (seed, step), so no generator's state has to be kept.
    """

    def __init__(self, folder: Path, seed: int, interval: float) -> None:
        self.folder = folder
        self.seed = seed
        self.interval = interval
        self.started = self.saved = time.monotonic()
        self.before = 0.0
        self.stopping = False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Over Lightning's own handler, which ends the process with success and saves nothing.
        signal.signal(signal.SIGTERM, self._stop)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(hash((self.seed, trainer.global_step, trainer.global_rank)) % 2**63)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Not between an epoch's last step and its evaluation: Lightning goes on from there with an
        # epoch skipped. What is due waits for the next epoch's first step, or for the end.
        if not trainer.is_last_batch:
            self._save_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Seconds spent so far, over all attempts."""
        return {"elapsed": self.elapsed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from the attempts that led here."""
        self.before = state_dict["elapsed"]

    @property
    def elapsed(self) -> float:
        """Seconds of this attempt and of those whose checkpoints it went on from."""
        return self.before + time.monotonic() - self.started

    def newest_first(self) -> list[Path]:
        """The checkpoints that stand in the folder."""
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)

    def latest_that_loads(self) -> Path | None:
        """The newest checkpoint that can be read; the others are set aside, and it says so."""
        for path in self.newest_first():
            try:
                torch.load(path, map_location="cpu", weights_only=True)
            except UNREADABLE as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                print(f"checkpoint {path.name} does not load ({reason}); trying an earlier one")
                path.rename(path.with_suffix(".unreadable"))
            else:
                return path
        return None

    @staticmethod
    def step_of(path: Path) -> int:
        """The step after which a checkpoint was saved."""
        return int(path.stem.removeprefix("step-"))

    def finish(self, network: nn.Module) -> None:
        """Keep the trained weights in place of the checkpoints: nothing goes on from here."""
        temporary = self.folder / "weights.tmp"
        torch.save(network.state_dict(), temporary)
        temporary.replace(self.folder / "weights.pt")
        for path in self.newest_first():
            path.unlink()

    def _save_if_due(self, trainer: L.Trainer) -> None:
        due = time.monotonic() - self.saved >= self.interval
        if not (due or self.stopping):
            return
        path = self.folder / f"step-{trainer.global_step:09d}.ckpt"
        trainer.save_checkpoint(path)
        # Lightning reports success even where nothing could be written.
        if not path.exists() or path.stat().st_size == 0:
            raise OSError(f"{path}: the checkpoint was not written")
        self.saved = time.monotonic()
        for old in self.newest_first()[KEEP:]:
            old.unlink()
        if self.stopping:
            raise Preempted(f"stopped by SIGTERM; saved at step {trainer.global_step}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            os._exit(128 + number)
        self.stopping = True
