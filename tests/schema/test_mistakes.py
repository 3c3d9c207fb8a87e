"""Errors of lit_attn in places that call code of users."""

import io
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from lit_attn import replace_attention
from lit_attn.checks import comparison, paths
from lit_attn.data import pictures
from lit_attn.models import vit
from lit_attn.models.block_checks import check_blocks
from lit_attn.models.vit import ViTConfig
from lit_attn.replace import torch_layers
from lit_attn.schema import errors, mistakes, plugins
from lit_attn.schema.base import load
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure
from lit_attn.signatures import ImageLabels
from lit_attn.tasks import metrics
from lit_attn.tasks.metrics import Outputs, TorchMetric

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


def test_a_package_that_is_not_installed_is_no_mistake_of_lit_attn(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        load("nowhere.inside:name")
    message = (
        f"nowhere is not installed for {sys.executable}; install lit_attn as in README.md: "
        "pip install -e ."
    )
    assert mistakes.describe_uncaught(raised.value) == (message, 1)
    assert not list(folder.iterdir())


def test_a_mistake_in_a_model_is_not_told_as_one_of_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(vit, "number_layers")
    with pytest.raises(ConfigError, match=r"this is a mistake of lit_attn \(NameError.*vit.py:"):
        check_blocks(MODEL, SIGNATURE, is_sharded=True, is_recomputed=False)
    (traceback,) = folder.glob("lit_attn-mistake-*.txt")
    assert "in assemble" in traceback.read_text()


def test_with_code_of_a_user_the_same_error_names_the_class_and_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of the user's code can be the reason, so it is not called a mistake of lit_attn."""
    monkeypatch.delattr(vit, "number_layers")
    monkeypatch.setitem(plugins.FILE_HASHES, Path("mine.py"), b"")
    message = (
        r"^model: class ViTConfig: NameError: name 'number_layers' is not defined"
        r" \(lit_attn/models/vit\.py:\d+; its traceback is in \S+\)$"
    )
    with pytest.raises(ConfigError, match=message):
        check_blocks(MODEL, SIGNATURE, is_sharded=True, is_recomputed=False)
    (traceback,) = folder.glob("lit_attn-mistake-*.txt")
    assert "in assemble" in traceback.read_text()
    assert mistakes.DESCRIBED == []


def test_a_mistake_in_a_metric_is_not_told_as_one_of_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(metrics, "_has_argument")
    metric = TorchMetric(name="AUROC", arguments={"task": "multiclass"}, record_as="mistaken")
    with pytest.raises(ValueError, match=r"mistake of lit_attn \(NameError.*metrics\.py:"):
        metric.info(Outputs("probabilities", 3))


def test_a_mistake_in_an_adapter_is_not_told_as_one_of_its_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch_layers, "linear")
    model = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    with pytest.raises(ConfigError, match=r"mistake of lit_attn \(NameError.*torch_layers\.py:"):
        replace_attention(model, "mgk")


def test_a_mistake_in_the_reader_of_pictures_is_not_told_as_a_damaged_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    Image.new("L", (2, 2)).save(content, "PNG")
    monkeypatch.delattr(pictures, "UPRIGHT")
    with pytest.raises(ConfigError, match=r"^x: this is a mistake of lit_attn \(NameError"):
        pictures.read_picture(content.getvalue(), "x", "RGB")


def test_the_doctor_tells_a_mistake_from_a_failure_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    case = paths.list_cases(cpu, paths.Selection(is_short=True))[0]
    layer = paths.build_layer("standard", case.shape)
    monkeypatch.delattr(comparison, "products_in_tf32")
    check = comparison.check_layer("standard", "ONE_CALL", layer, case, cpu)
    assert "this is a mistake of lit_attn (NameError" in check.failure
    try:
        raise RuntimeError("out of resource: shared memory\nand a second line")
    except RuntimeError as error:
        words = mistakes.describe_check_failure(error)
    assert words == "RuntimeError: out of resource: shared memory"


def test_an_error_at_the_call_is_no_mistake_of_lit_attn(folder: Path) -> None:
    with pytest.raises(KeyError) as caught:
        {}["missing"]
    assert explain_failure(caught.value, "import: m:C") == "import: m:C: KeyError: 'missing'"
    assert list(folder.iterdir()) == []


def raise_in_user_code(folder: Path, error: str) -> object:
    """Run code of a user in a file of `folder` that raises `error`."""
    path = folder / "mine.py"
    path.write_text(f"raise {error}\n")
    return exec(compile(path.read_text(), str(path), "exec"))


def test_every_uncaught_exception_of_a_command_is_one_line_and_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 of `judge` means an undecided verdict, so a mistake must not end with it."""
    calls = {
        # A library raises the exception, called by lit_attn.
        "this is a mistake of lit_attn (AttributeError: ": (lambda: plugins.locate_copy(1, 2), 70),
        "not enough memory: ": (lambda: bytearray(2**62), 2),
        "not enough memory: [enforce fail at": (lambda: torch.empty(2**58), 2),
        f"{folder}/mine.py:1: calls sys.exit; raise an exception instead": (
            lambda: raise_in_user_code(folder, "SystemExit(0)"),
            2,
        ),
        f"{folder}/mine.py:1: KeyError: 'x'; its traceback is in {folder}/lit_attn-mistake-": (
            lambda: raise_in_user_code(folder, "KeyError('x')"),
            1,
        ),
    }
    for beginning, (call, code) in calls.items():
        assert errors.command(call)() == code
        message = capsys.readouterr().err
        assert message.startswith(beginning)
        assert message.count("\n") == 1


def test_every_program_describes_its_mistakes() -> None:
    """`cells.nodes` is the process of a rank, whose log has the traceback."""
    programs = [
        path
        for path in mistakes.PACKAGE.rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text()
    ]
    # It runs the program of the hub.
    programs.remove(mistakes.PACKAGE / "generate.py")
    programs.append(mistakes.PACKAGE / "hub" / "generate.py")
    assert len(programs) > 8
    bare = {path.name for path in programs if "\n@command\ndef main(" not in path.read_text()}
    assert bare == {"nodes.py"}
