"""The checkout of released code that a recorder accepts."""

import subprocess
from pathlib import Path

import pytest

from released.record import Clone


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> tuple[Path, str]:
    """Return a checkout of one file, and its commit."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("rate = 1\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "--message=First")
    return tmp_path, git(tmp_path, "rev-parse", "HEAD")


def test_a_clean_checkout_of_the_commit_is_accepted(checkout: tuple[Path, str]) -> None:
    folder, commit = checkout
    (folder / "__pycache__").mkdir()
    source = Clone(folder, "a/b", commit[:7]).source("train.py", {"rate = 1": "rate = 2"})
    assert source == "rate = 2"


def test_another_commit_is_refused(checkout: tuple[Path, str]) -> None:
    folder, commit = checkout
    git(folder, "commit", "--quiet", "--allow-empty", "--message=Second")
    with pytest.raises(SystemExit, match=f"check out {commit} of a/b"):
        Clone(folder, "a/b", commit)


def test_local_edits_are_refused(checkout: tuple[Path, str]) -> None:
    """Modules that the released code imports come from the folder, and not from the commit."""
    folder, commit = checkout
    (folder / "train.py").write_text("rate = 3\n")
    with pytest.raises(SystemExit, match=r"has local edits: train\.py"):
        Clone(folder, "a/b", commit)


def test_a_replacement_has_to_match_once(checkout: tuple[Path, str]) -> None:
    with pytest.raises(SystemExit, match="'epoch' occurs 0 times, not once"):
        Clone(checkout[0], "a/b", checkout[1]).source("train.py", {"epoch": "step"})
