"""Paths in a study: relative to the file they stand in, wherever the command runs."""

from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate.__main__ import parse_settings
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.cell import Cell
from lit_attn.config.overrides import _path_keys
from lit_attn.config.study import read_studies

IMAGES = (
    "data: {kind: folder, name: mine, path: images, size: 8, channels: 1, classes: 2,"
    " batch_size: 4}\n" + studies.EXPERIMENT.split("\n", 1)[1]
)
TEXT = """\
task: language-modelling
data:
  kind: shards
  name: mine
  folder: ../tokens
  tokenizer: {kind: gpt2, folder: words}
  context: 8
  batch_size: 2
  epoch_steps: 2
model: {kind: gpt, dim: 16, depth: 1, heads: 2, ffn: {width: 32}}
optimizer: {kind: adamw, lr: 1e-3}
training: {epochs: 2}
"""


def matrix(folder: Path, body: str, experiment: str, *settings: str) -> Matrix:
    """A study whose experiment's file stands in a folder of its own."""
    path = studies.write(folder, body, experiment)
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "experiment.yaml").rename(folder / "recipes" / "experiment.yaml")
    path.write_text(path.read_text().replace("experiment.yaml", "recipes/experiment.yaml"))
    return expand(
        read_studies(path)["tiny"], folder / "runs", parse_settings("--set", list(settings))
    )


def data_of(found: Matrix, variant: str) -> dict[str, str]:
    (chosen,) = [v for v in found.variants if v.name == variant]
    return {name: str(value) for name, value in chosen.experiment.data}


def test_each_file_is_the_place_of_its_paths(tmp_path: Path) -> None:
    body = "baseline: a\nmatch: none\ncells: {a: {}, b: {data: {name: x, path: ours}}}"
    found = matrix(tmp_path, body, IMAGES)
    assert data_of(found, "a")["path"] == str(tmp_path / "recipes" / "images")
    assert data_of(found, "b")["path"] == str(tmp_path / "ours")
    common = matrix(tmp_path, body + "\nset: {data.path: /all}", IMAGES)
    assert [data_of(common, name)["path"] for name in "ab"] == ["/all", str(tmp_path / "ours")]


def test_on_a_command_line_they_are_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    found = matrix(tmp_path, "baseline: a\ncells: {a: {}}", IMAGES, "data.path=theirs")
    assert data_of(found, "a")["path"] == "/theirs"
    assert not found.is_trial


def test_parts_of_parts_have_paths_too(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}}\nmetric: {name: val/loss}"
    found = matrix(tmp_path, body, TEXT)
    (variant,) = found.variants
    assert data_of(found, "a")["folder"] == str(tmp_path / "tokens")
    words = variant.experiment.data.tokenizer.folder  # type: ignore[attr-defined]
    assert words == tmp_path / "recipes" / "words"


def test_a_study_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a cell finds its data, wherever it is run again."""
    body = "baseline: a\ncells: {a: {}}"
    found = []
    for place, there in ((tmp_path, Path()), (tmp_path / "recipes", Path(".."))):
        matrix(tmp_path, body, IMAGES)
        monkeypatch.chdir(place)
        found.append(expand(read_studies(there / "ablations.yaml")["tiny"], tmp_path / "runs"))
    here, elsewhere = ([job.cell for job in one.jobs] for one in found)
    assert here == elsewhere
    here[0].write(tmp_path / "config.yaml")
    read = Cell.read(tmp_path / "config.yaml")
    assert read.experiment.data.path == tmp_path / "recipes" / "images"  # type: ignore[attr-defined]
    # It is no part of what is computed.
    moved = matrix(tmp_path, body, IMAGES.replace("images", "others"))
    assert [job.identity for job in moved.jobs] == [cell.fingerprint for cell in here]


def test_every_key_of_a_path_is_known() -> None:
    found = {".".join(keys) for keys in _path_keys()}
    assert {"data.path", "data.root", "data.folder", "data.train", "data.tokenizer.folder"} < found
    assert "model.checkpoint" in found
    assert "data.name" not in found
