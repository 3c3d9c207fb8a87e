"""Checkpoints from which a cell goes on as if it had never stopped."""

import io
import pickle
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import nn

from lit_attn.cells.failure import Preempted
from lit_attn.files import write_atomic
from lit_attn.training.process_group import Group

KEEP = 2

# How urgent the next checkpoint is; devices agree on the most urgent.
LATER, DUE, STOP = range(3)

# What torch.load raises on a file cut short, zeroed or overwritten.
UNREADABLE = (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError)


class Checkpoints(L.Callback):
    """Saves the whole training state every `interval` seconds, always just before a step.

    There an epoch's evaluation and its metrics are over and done; between an epoch's last step and
    its evaluation Lightning would go on with an epoch skipped. The newest two are kept: one may be
    cut short by a crash that a rename does not protect from, a lying disk for instance. SIGTERM
    saves once more and raises Preempted. Every step's random numbers are seeded from (seed, step),
    so no generator's state has to be kept. Devices that train together save together.
    """

    def __init__(self, folder: Path, seed: int, interval: float, group: Group) -> None:
        self.folder = folder
        self.seed = seed
        self.interval = interval
        self.group = group
        self.started = self.saved = time.monotonic()
        self.before = 0.0
        self.stopped = False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Over Lightning's own handler, which ends the process with success and saves nothing.
        signal.signal(signal.SIGTERM, self._stop)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        due = DUE if time.monotonic() - self.saved >= self.interval else LATER
        urgency = self.group.most(STOP if self.stopped else due)
        if urgency > LATER:
            self._save(trainer)
        if urgency == STOP:
            raise Preempted(f"stopped by SIGTERM; saved at step {trainer.global_step}")
        seed = hash((self.seed, trainer.global_step, trainer.global_rank)) % 2**63
        # Not torch.manual_seed: without a GPU it formats a stack trace for every kind of device.
        torch.default_generator.manual_seed(seed)
        if module.device.type == "cuda":
            torch.cuda.manual_seed(seed)

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
        return self.group.from_first(self._latest_that_loads() if self.group.is_first else None)

    def _latest_that_loads(self) -> Path | None:
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
        """How many steps had been made when a checkpoint was saved."""
        return int(path.stem.removeprefix("step-"))

    def keep_weights(self, network: nn.Module, name: str = "weights.pt") -> None:
        """Write the trained weights to `weights.pt`, or by another name."""
        # Not to the file at once: there torch.save hides that a disk is full.
        content = io.BytesIO()
        torch.save(network.state_dict(), content)
        write_atomic(self.folder / name, content.getvalue())

    def clear(self) -> None:
        """Remove the checkpoints: with a result written, nothing goes on from them."""
        for path in self.newest_first():
            path.unlink()

    def _save(self, trainer: L.Trainer) -> None:
        path = self.folder / f"step-{trainer.global_step:09d}.ckpt"
        trainer.save_checkpoint(path)
        # Lightning reports success even where nothing could be written.
        if not path.exists() or path.stat().st_size == 0:
            raise OSError(f"{path}: the checkpoint was not written")
        self.saved = time.monotonic()
        if self.group.is_first:
            for old in self.newest_first()[KEEP:]:
                old.unlink()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        # However often it comes, and whenever: a scheduler, the runner and the cell's first process
        # all pass on the same one. Who cannot wait for a checkpoint sends SIGKILL.
        self.stopped = True
