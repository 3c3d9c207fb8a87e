"""Checkpoints from which a cell continues exactly as if it had never stopped."""

import errno
import io
import signal
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch import distributed

from lit_attn.cells.failure import OUT_OF_MEMORY, Preempted
from lit_attn.cells.folder import set_aside
from lit_attn.files import write_atomic
from lit_attn.private_names.of_lightning import is_raised_by_restoring
from lit_attn.schema.mistakes import first_line
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance, describe_changes, join_provenances

KEEP = 2  # Number of checkpoints kept: a disk may lose the newest one in a power cut.

AGREEMENT_SECONDS = 0.5
"""Seconds between two agreements of several ranks on saving a checkpoint or stopping."""
MOST_STEPS = 100
"""Most steps between two agreements; the time of a step can change."""

MACHINE_ERRORS = (
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    distributed.DistError,
)
"""Exceptions about memory, a device or another rank."""
DAMAGES = {errno.EIO, errno.ENOENT}
"""Errors of a file that a disk has lost."""

# Urgency of the next checkpoint. All ranks follow the most urgent rank.
LATER, DUE, STOP = range(3)


@dataclass(eq=False)
class Checkpoints(L.Callback):
    """Callback that saves the training state every `interval` seconds, and on SIGTERM.

    It saves just before a step, when the epoch before is evaluated and recorded. (Between an
    epoch's last step and its evaluation, Lightning would resume with the next epoch.) All ranks
    save together. Random generators need no state: each step is seeded with (seed, step, rank).
    `describe` returns the provenance of this attempt; a checkpoint has that of all attempts.
    """

    folder: Path
    seed: int
    interval: float
    group: ProcessGroup
    describe: Callable[[], Provenance]
    earlier_attempts: list[Provenance] = field(default_factory=list, init=False)
    started: float = field(default_factory=time.monotonic, init=False)
    saved: float = field(default_factory=time.monotonic, init=False)
    elapsed_before: float = field(default=0.0, init=False)
    is_stopped: bool = field(default=False, init=False)
    agreed: float = field(default_factory=time.monotonic, init=False)
    last_agreement: int = field(default=0, init=False)
    next_agreement: int = field(default=0, init=False)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Replaces Lightning's handler, which exits with success and saves nothing.
        signal.signal(signal.SIGTERM, self._stop)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        urgency = self._agree(trainer.global_step)
        if urgency > LATER:
            self._save(trainer)
        if urgency == STOP:
            raise Preempted(f"stopped by SIGTERM; saved at step {trainer.global_step}")
        self._seed_step(trainer, module.device)

    def _agree(self, step: int) -> int:
        """Return the urgency of the next checkpoint for all ranks, before training step `step`.

        To agree makes the ranks wait for each other, so several ranks agree about once in
        AGREEMENT_SECONDS: at a step that they have chosen together, from the time of a step.
        """
        if self.group.world_size == 1:
            return self._own_urgency()
        if step < self.next_agreement:
            return LATER
        now = time.monotonic()
        steps_since = max(1, step - self.last_agreement)
        microseconds = round(1e6 * (now - self.agreed) / steps_since)
        urgency, slowest = self.group.maxima([self._own_urgency(), microseconds])
        steps_until = int(1e6 * AGREEMENT_SECONDS / max(1, slowest))
        self.next_agreement = step + min(max(1, steps_until), MOST_STEPS)
        self.last_agreement = step
        self.agreed = time.monotonic()
        return urgency

    def _own_urgency(self) -> int:
        """Return the urgency of the next checkpoint for this rank alone."""
        if self.is_stopped:
            return STOP
        seconds_since_save = time.monotonic() - self.saved
        return DUE if seconds_since_save >= self.interval else LATER

    def _seed_step(self, trainer: L.Trainer, device: torch.device) -> None:
        """Seed the random generators with (seed, step, rank)."""
        seed = hash((self.seed, trainer.global_step, trainer.global_rank)) % 2**63
        # torch.manual_seed would format a stack trace for every kind of device on a CPU.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the seconds and the provenance of all attempts."""
        unique: list[Provenance] = []
        for attempt in (*self.earlier_attempts, self.describe()):
            if attempt not in unique:
                unique.append(attempt)
        return {
            "elapsed": self.elapsed,
            "attempts": [tuple(attempt) for attempt in unique],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Add the seconds and the provenance of earlier attempts; report what has changed."""
        self.elapsed_before = state_dict["elapsed"]
        self.earlier_attempts = []
        for values in state_dict.get("attempts", ()):
            named = dict(zip(Provenance._fields, values, strict=False))
            # Checkpoints of older versions have no modules.
            named.setdefault("modules", {})
            self.earlier_attempts.append(Provenance(**named))
        if not self.earlier_attempts or not self.group.is_rank_zero:
            return
        for change in describe_changes(self.earlier_attempts[-1], self.describe()):
            print(change, flush=True)

    @property
    def provenance(self) -> Provenance:
        """The provenance of all attempts that led here."""
        return join_provenances([*self.earlier_attempts, self.describe()])

    @property
    def elapsed(self) -> float:
        """Seconds of this attempt and of the attempts whose checkpoints it continues."""
        return self.elapsed_before + time.monotonic() - self.started

    def list_newest_first(self) -> list[Path]:
        """Return the checkpoints in the folder, newest first."""
        return sorted(self.folder.glob("step-*.ckpt"), reverse=True)

    def find_newest(self) -> Path | None:
        """Return the newest readable checkpoint. Unreadable ones are reported and renamed."""
        newest = self._find_readable() if self.group.is_rank_zero else None
        return self.group.broadcast(newest)

    def _find_readable(self) -> Path | None:
        """Return the newest checkpoint that loads, and rename newer ones that do not."""
        for path in self.list_newest_first():
            try:
                require_readable(path)
            except Exception as error:  # torch.load may raise any for a damaged file.
                if is_about_machine(error):
                    raise
                self._set_aside(path, "does not load", error)
            else:
                return path
        return None

    def reject(self, path: Path, error: Exception) -> bool:
        """Set `path` aside if it does not fit the cell, as `error` says, and return True.

        Return False for an error after the checkpoint was restored, and for one about the machine.
        Every rank must call this: all ranks restore the same file.
        """
        if not is_raised_by_restoring(error) or is_about_machine(error):
            return False
        if self.group.is_rank_zero:
            self._set_aside(path, "does not fit this cell", error)
        return True

    @staticmethod
    def _set_aside(path: Path, problem: str, error: Exception) -> None:
        """Print why a checkpoint cannot be used, and rename it."""
        reason = first_line(error)
        print(f"checkpoint {path.name} {problem} ({reason}); trying an earlier one", flush=True)
        set_aside(path)

    def write_weights(self, weights: dict[str, Any], name: str) -> None:
        """Write the weights of a network to the checkpoint folder."""
        # Through memory: given a file, torch.save hides that a disk is full.
        content = io.BytesIO()
        torch.save(weights, content)
        write_atomic(self.folder / name, content.getvalue())

    def clear(self) -> None:
        """Remove the checkpoints of a cell that has a result."""
        for path in self.list_newest_first():
            path.unlink()

    def _save(self, trainer: L.Trainer) -> None:
        """Write a checkpoint of all ranks, and remove all but the newest KEEP."""
        path = self.folder / f"step-{trainer.global_step:09d}.ckpt"
        trainer.save_checkpoint(path)
        # Lightning reports success even if it could not write anything.
        if not path.exists() or path.stat().st_size == 0:
            raise OSError(f"{path}: the checkpoint was not written")
        self.saved = time.monotonic()
        if self.group.is_rank_zero:
            for old in self.list_newest_first()[KEEP:]:
                old.unlink()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: save before the next step, then stop."""
        # A second SIGTERM changes nothing: the scheduler, the runner and the cell's first process
        # all pass on the same signal. SIGKILL ends a cell without a checkpoint.
        self.is_stopped = True


def is_about_machine(error: Exception) -> bool:
    """Return True if `error` says nothing about the checkpoint that was read or restored.

    Memory, a device, another rank or the file system failed, and can work in another attempt.
    """
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in DAMAGES
    # PyTorch raises a plain RuntimeError if the memory of the host is too small.
    return isinstance(error, MACHINE_ERRORS) or OUT_OF_MEMORY.search(str(error)) is not None


def require_readable(path: Path) -> None:
    """Raise an exception, of any class, if the checkpoint cannot be read completely."""
    with zipfile.ZipFile(path) as archive:
        # torch.load compares no checksums: it would take a flipped bit for a weight.
        damaged_name = archive.testzip()
    if damaged_name:
        raise ValueError(f"the checksum of {damaged_name} differs")
    torch.load(path, map_location="cpu", weights_only=True)
