"""Cells that wait at a step: `python -m helpers.holding` is the command line with such cells.

While the working directory has a file `hold` with a number, a cell that has completed this many
steps waits, and a file `held` in its folder has the pid of the waiting process. A test can so
observe, stop or kill a cell during its training, on a machine of any speed. SIGTERM ends the wait.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any


def hold_cells() -> None:
    """Let the cells of this process and of its children wait."""
    from lit_attn.training.recording import Progress

    original = Progress.on_train_batch_end

    def end_batch(self: Any, trainer: Any, *arguments: Any) -> None:
        original(self, trainer, *arguments)
        held = self.path.with_name("held")
        while read_number(Path("hold"), default=sys.maxsize) <= trainer.global_step:
            if any(getattr(callback, "is_stopped", False) for callback in trainer.callbacks):
                break
            held.write_text(str(os.getpid()))
            time.sleep(0.02)
        held.unlink(missing_ok=True)

    Progress.on_train_batch_end = end_batch  # type: ignore[method-assign]


def hold_at(folder: Path, step: int) -> None:
    """Let the cells of a command whose working directory is `folder` wait at a step."""
    (folder / "hold.new").write_text(str(step))
    (folder / "hold.new").replace(folder / "hold")


def read_number(path: Path, default: int) -> int:
    """Return the number in a file, or `default` if the file is missing or still empty."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return default


def _main() -> int:
    from lit_attn.ablate import runner
    from lit_attn.ablate.__main__ import main

    # A cell is tried again at once.
    runner.BACKOFF = 0.1
    return main()


# The processes of the cells import the main module under this name.
if __name__ == "__mp_main__":
    hold_cells()
if __name__ == "__main__":
    sys.exit(_main())
