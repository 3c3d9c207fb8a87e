"""Uses of TensorBoard's private names; NAMES in lit_attn.private_names explains each."""

import os
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


def events_path(events: SummaryWriter) -> Path:
    """Return the file that a writer has opened."""
    writer: Any = events.file_writer
    return Path(writer.event_writer._file_name)


def rename_events(events: SummaryWriter, path: Path) -> None:
    """Rename the file that a writer has opened, and let the writer continue with it."""
    events_path(events).rename(path)
    writer: Any = events.file_writer
    writer.event_writer._file_name = str(path)
    # TensorBoard opens the file by its name for each write.
    writer.event_writer._general_file_writer.filename = os.fsencode(path)
