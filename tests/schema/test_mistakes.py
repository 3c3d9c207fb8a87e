"""Errors of lit_attn in places that call code of users."""

import tempfile
from pathlib import Path

import pytest

from lit_attn.models import vit
from lit_attn.models.block_checks import check_blocks
from lit_attn.models.vit import ViTConfig
from lit_attn.schema import mistakes, plugins
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure
from lit_attn.signatures import ImageLabels

MODEL = ViTConfig(dim=16, depth=1, heads=2, patch=4, ffn={"width": 16})
SIGNATURE = ImageLabels((1, 8, 8), 10)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of tracebacks, for a process that has imported no code of a user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mistakes, "DESCRIBED", [])
    monkeypatch.setattr(plugins, "FILE_HASHES", {})
    monkeypatch.setattr(plugins, "PACKAGE_VERSIONS", {})
    return tmp_path


def test_a_mistake_in_a_model_is_not_told_as_one_of_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(vit, "number_layers")
    with pytest.raises(ConfigError, match=r"this is a mistake of lit_attn \(NameError.*vit.py:"):
        check_blocks(MODEL, SIGNATURE, is_sharded=True, is_recomputed=False)
    (traceback,) = folder.glob("lit_attn-mistake-*.txt")
    assert "in assemble" in traceback.read_text()


def test_with_code_of_a_user_the_same_error_names_the_class(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(vit, "number_layers")
    monkeypatch.setitem(plugins.FILE_HASHES, Path("mine.py"), b"")
    with pytest.raises(ConfigError, match=r"^model: class ViTConfig: NameError: name 'number"):
        check_blocks(MODEL, SIGNATURE, is_sharded=True, is_recomputed=False)
    assert list(folder.iterdir()) == []


def test_an_error_at_the_call_is_no_mistake_of_lit_attn(folder: Path) -> None:
    with pytest.raises(KeyError) as caught:
        {}["missing"]
    assert explain_failure(caught.value, "import: m:C") == "import: m:C: KeyError: 'missing'"
    assert list(folder.iterdir()) == []
