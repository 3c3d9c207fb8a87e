"""The code hash covers what a cell executes, and nothing else."""

import sys
from pathlib import Path

import pytest

from lit_attn.schema.plugins import load_parts
from lit_attn.schema.sources import hash_source, list_modules
from lit_attn.training.provenance import code_hash, hash_package

pytestmark = pytest.mark.slow

SOURCE = b'''"""A module."""

LIMIT = 3
"""The limit."""


class Part:
    """A part."""

    def compute(self, x):
        """Return twice x."""
        return 2 * x  # doubled


def nothing():
    """Do nothing."""
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"# doubled", b"# two times"),
        (b"# doubled", b""),
        (b"A module.", b"A better module."),
        (b"The limit.", b"The upper limit."),
        (b"Return twice x.", b"Return x + x."),
        (b'        """Return twice x."""\n', b""),
        (b"LIMIT = 3\n", b"\n\nLIMIT  =  3\n\n"),
        (b"(self, x)", b"(\n        self,\n        x,\n    )"),
    ],
)
def test_comments_docstrings_and_layout_keep_the_hash(old: bytes, new: bytes) -> None:
    assert old in SOURCE
    assert hash_source(SOURCE.replace(old, new)) == hash_source(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"LIMIT = 3", b"LIMIT = 4"),
        (b"LIMIT = 3", b"LIMIT = 3.0"),
        (b"LIMIT = 3", b"LIMIT = None"),
        (b"LIMIT", b"BOUND"),
        (b"2 * x", b"x * 2"),
        (b"2 * x", b"'x'"),
        (b"(self, x)", b"(self, x=None)"),
    ],
)
def test_a_changed_constant_or_name_changes_the_hash(old: bytes, new: bytes) -> None:
    assert old in SOURCE
    assert hash_source(SOURCE.replace(old, new)) != hash_source(SOURCE)


def test_the_package_hash_covers_the_modules_that_a_cell_can_reach(tmp_path: Path) -> None:
    not_reached = ("report/table.py", "ablate/runner.py", "data/prepare.py", "generate.py")
    for name in ("models/vit.py", "training/fit.py", *not_reached):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("X = 1\n")
    before = hash_package(list_modules(tmp_path)).digest()
    for name in not_reached:
        (tmp_path / name).write_text("X = 2\n")
    (tmp_path / "models" / "vit.py").write_text('"""Vision transformer."""\n\nX = 1\n')
    assert hash_package(list_modules(tmp_path)).digest() == before
    (tmp_path / "models" / "vit.py").write_text("X = 2\n")
    changed = hash_package(list_modules(tmp_path)).digest()
    assert changed != before
    (tmp_path / "models" / "vit.py").rename(tmp_path / "models" / "vision.py")
    assert hash_package(list_modules(tmp_path)).digest() not in (before, changed)


def test_a_comment_in_a_part_keeps_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "a_commented_part.py"
    hashes = []
    for text in ("X = 1\n", '"""A part."""\nX = 1  # one\n', "X = 2\n"):
        path.write_text(text)
        load_parts([path])
        hashes.append(code_hash([path]))
        monkeypatch.delitem(sys.modules, path.stem)
    assert hashes[0] == hashes[1] != hashes[2]
