"""A folder gets its name after its files are on the disk."""

import os
from pathlib import Path

import pytest

from lit_attn.files import rename_written


def test_files_are_on_the_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "one").write_text("1")
    (folder / "two").write_text("2")
    target = tmp_path / "kept" / "branch"
    written: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        written.append((name, target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    rename_written(folder, target)
    assert sorted(written[:2]) == [("one", False), ("two", False)]
    assert written[2:] == [("new", False), ("kept", True)]
    assert (target / "two").read_text() == "2"
