"""Uses of TensorBoard's private names; NAMES in lit_attn.private_names explains each."""

import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


def add_summary(events: SummaryWriter, summary: Any, step: int) -> None:
    """Write one summary as it is."""
    events._get_file_writer().add_summary(summary, step)


def events_path(events: SummaryWriter) -> Path:
    """Return the file that a writer has opened."""
    return Path(events._get_file_writer().event_writer._file_name)


def rename_events(events: SummaryWriter, path: Path) -> None:
    """Rename the file that a writer has opened, and let the writer continue with it."""
    events_path(events).rename(path)
    writer: Any = events._get_file_writer().event_writer
    writer._file_name = str(path)
    # TensorBoard opens the file by its name for each write.
    writer._general_file_writer.filename = os.fsencode(path)
