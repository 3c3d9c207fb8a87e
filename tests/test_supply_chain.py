"""Code and data from elsewhere: pinned, encrypted, and read without executing anything."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

import lit_attn
from lit_attn.replace.timm_models import create_timm

SOURCES = [*Path(lit_attn.__file__).parent.rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
SOURCES += (ROOT / "docs" / "generators").rglob("*.py")

SAFE_ARGUMENTS = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
FORBIDDEN = {
    *("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "pickle.load"),
    *("pickle.loads", "joblib.load", "shelve.open", "marshal.loads", "eval", "exec", "os.system"),
    *("shutil.unpack_archive", "os.popen"),
}
FORBIDDEN_METHODS = {"extractall", "extract"}


def list_calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the place, the name and the node of every call in the code of this project."""
    for path in sorted(SOURCES):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call):
                yield f"{path.name}:{node.lineno}", ast.unparse(node.func), node


def test_no_file_is_unpickled_evaluated_or_extracted() -> None:
    for place, name, node in list_calls():
        assert name not in FORBIDDEN, place
        # `read.extract` and similar names of our modules would be functions, not methods.
        assert name.rpartition(".")[2] not in FORBIDDEN_METHODS, place
        arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if name in SAFE_ARGUMENTS:
            key, value = SAFE_ARGUMENTS[name]
            assert arguments.get(key) == str(value), place
        assert arguments.get("shell", "False") == "False", place
        assert arguments.get("trust_remote_code", "False") == "False", place


def test_models_of_transformers_never_execute_code_of_their_folder() -> None:
    count = 0
    for place, name, node in list_calls():
        is_of_transformers = name.startswith(("transformers.", "factory.from_"))
        if not is_of_transformers or not name.endswith((".from_pretrained", ".from_config")):
            continue
        count += 1
        arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert arguments.get("trust_remote_code") == "False", place
    assert count == 3


def test_the_oldest_timm_refuses_pickles() -> None:
    """timm 1.0.26 is the first version whose `load_state_dict` reads weights only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (timm,) = [name for name in project["dependencies"] if name.startswith("timm")]
    assert timm == "timm>=1.0.26"


class Payload:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["weights.pth", "weights.bin", "weights.npz"])
def test_pretrained_weights_execute_no_code(name: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    torch.save({"state_dict": Payload(touched)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"cannot load|did not find a supported"):
        create_timm("vit_tiny_patch16_224", (32, 32), {}, True, tmp_path / name)
    assert not touched.exists()


def test_actions_are_pinned_to_commits() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40}  # v\d", line), line


def test_downloads_are_encrypted() -> None:
    for path in sorted(SOURCES):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.match(r"(http|ftp)://(?!host|127\.)", node.value), path
