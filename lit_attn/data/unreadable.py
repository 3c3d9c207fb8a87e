"""Images that cannot be read: named, counted together by all processes, and left out.

With `data.unreadable: n` up to n images of each split are left out; with 0, the default, the first
one ends the cell. Training takes the next image that can be read, with its own label. So a batch
stays a function of the seed, the step and the files. An evaluation covers the other images only.

Each rank appends what it finds to a file of the cell, and so do its worker processes. They count
the images of all files, and the report names them.
"""

import os
from pathlib import Path

from lit_attn.cells.rows import UnreadableImage, csv_lines, read_unreadable
from lit_attn.data.log import LOG
from lit_attn.schema.errors import ConfigError


class UnreadableImages:
    """Images of a data set that one process has left out.

    `limit` is the largest number of a split. `folder` is that of the cell, which the processes of
    the cell share; None counts for this process only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.folder: Path | None = None
        self.rank = 0
        self.known: dict[tuple[str, str], UnreadableImage] = {}

    def open_record(self, folder: Path, rank: int, *, is_new: bool) -> None:
        """Use the record of a cell in `folder`; delete that of an earlier training if `is_new`."""
        self.folder = folder
        self.rank = rank
        if is_new:
            self._path.unlink(missing_ok=True)

    def leave_out(self, split: str, image: str, error: ConfigError) -> None:
        """Record that an image was left out; raise `error` or ConfigError above the limit."""
        if self.limit == 0:
            raise error
        if (split, image) in self.known:
            return
        # The message begins with the key and the image, and ends with what to do.
        reason = str(error).removeprefix(f"data.path: {image} ")
        entry = UnreadableImage(split, image, reason)
        recorded = [] if self.folder is None else read_unreadable(self.folder)
        for other in recorded:
            self.known[other.split, other.image] = other
        if (split, image) in self.known:
            return
        self.known[split, image] = entry
        if self.folder is not None:
            self._append(entry)
        count = sum(other.split == split for other in self.known.values())
        if count > self.limit:
            raise ConfigError(
                f"data.unreadable: {count} images of {split} cannot be read, and the limit is "
                f"{self.limit}; the last one: {image} {reason}"
            )
        LOG.warning("data.unreadable: left out of %s: %s %s", split, image, reason)

    @property
    def _path(self) -> Path:
        assert self.folder is not None
        return self.folder / f"unreadable-{self.rank}.csv"

    def _append(self, entry: UnreadableImage) -> None:
        """Append a line in one write, so that lines of several processes do not mix."""
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        file = os.open(self._path, flags, 0o666)
        try:
            os.write(file, csv_lines([entry]).encode())
        finally:
            os.close(file)
