"""Paths in a study are relative to their file, in whatever folder the command runs."""

from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate.commands.options import parse_settings
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.cell import Cell
from lit_attn.config.overrides import _path_keys
from lit_attn.config.study import read_studies, read_titles
from lit_attn.schema.errors import ConfigError

IMAGES = studies.with_data(
    "{kind: npz, name: mine, path: images, size: 8, channels: 1, classes: 2, batch_size: 4}"
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


def expand_study(folder: Path, body: str, experiment: str, *settings: str) -> Matrix:
    """Expand a study whose experiment is in the subfolder `recipes`."""
    path = studies.write(folder, body, experiment)
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "experiment.yaml").rename(folder / "recipes" / "experiment.yaml")
    path.write_text(path.read_text().replace("experiment.yaml", "recipes/experiment.yaml"))
    return expand(read_studies(path)["tiny"], folder / "runs", parse_settings(list(settings)))


def read_data(matrix: Matrix, variant: str) -> dict[str, str]:
    (match,) = [v for v in matrix.variants if v.name == variant]
    return {name: str(value) for name, value in match.experiment.data}


def test_a_path_is_relative_to_its_file(tmp_path: Path) -> None:
    body = "baseline: a\nmatch: none\ncells: {a: {}, b: {data: {name: x, path: ours}}}"
    matrix = expand_study(tmp_path, body, IMAGES)
    assert read_data(matrix, "a")["path"] == str(tmp_path / "recipes" / "images")
    assert read_data(matrix, "b")["path"] == str(tmp_path / "ours")
    common = expand_study(tmp_path, body + "\nset: {data.path: /all}", IMAGES)
    assert [read_data(common, name)["path"] for name in "ab"] == ["/all", str(tmp_path / "ours")]


def test_a_path_on_the_command_line_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    matrix = expand_study(tmp_path, "baseline: a\ncells: {a: {}}", IMAGES, "data.path=theirs")
    assert read_data(matrix, "a")["path"] == "/theirs"
    assert matrix.name == matrix.source.name


def test_nested_configurations_have_absolute_paths(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}}\nmetric: {name: val/loss}"
    matrix = expand_study(tmp_path, body, TEXT)
    (variant,) = matrix.variants
    assert read_data(matrix, "a")["folder"] == str(tmp_path / "tokens")
    words = variant.experiment.data.tokenizer.folder  # type: ignore[attr-defined]
    assert words == tmp_path / "recipes" / "words"


def test_a_study_is_the_same_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell reads its data in every working directory, and its identity contains no path."""
    body = "baseline: a\ncells: {a: {}}"
    matrices = []
    for directory, prefix in ((tmp_path, Path()), (tmp_path / "recipes", Path(".."))):
        expand_study(tmp_path, body, IMAGES)
        monkeypatch.chdir(directory)
        matrices.append(expand(read_studies(prefix / "ablations.yaml")["tiny"], tmp_path / "runs"))
    first, second = ([job.cell for job in one.jobs] for one in matrices)
    assert first == second
    first[0].write(tmp_path / "config.yaml")
    read = Cell.read(tmp_path / "config.yaml")
    assert read.experiment.data.path == tmp_path / "recipes" / "images"  # type: ignore[attr-defined]
    moved = expand_study(tmp_path, body, IMAGES.replace("images", "others"))
    assert [job.identity for job in moved.jobs] == [cell.fingerprint for cell in first]


def test_the_keys_of_all_paths_are_found() -> None:
    keys = {".".join(path) for path in _path_keys()}
    assert {"data.path", "data.root", "data.folder", "data.train", "data.tokenizer.folder"} < keys
    assert "model.checkpoint" in keys
    assert "data.name" not in keys


FURTHER = """\
studies:
  other:
    title: Another study
    experiment: ../experiment.yaml
    seeds: 1
    cells: {standard: {attention: standard}}
    baseline: standard
"""


def with_files(folder: Path, files: str) -> Path:
    """Write an ablations.yaml with one study, and a further file of studies in a subfolder."""
    path = studies.write(folder, "cells: {standard: {attention: standard}}\nbaseline: standard")
    path.write_text(f"files: {files}\n{path.read_text()}")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "studies.yaml").write_text(FURTHER)
    return path


def test_studies_of_further_files_have_paths_relative_to_their_own_file(tmp_path: Path) -> None:
    sources = read_studies(with_files(tmp_path, "{recipe/studies.yaml: [other]}"))
    assert list(sources) == ["tiny", "other"]
    assert sources["other"].experiment_path == tmp_path / "experiment.yaml"
    mistake = sources["other"].error(("seeds",), "is wrong")
    assert str(mistake) == f"{tmp_path}/recipe/studies.yaml:5: other.seeds: is wrong"
    assert read_titles(tmp_path / "ablations.yaml") == {
        "tiny": "A tiny study",
        "other": "Another study",
    }


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("{recipe/studies.yaml: [othr]}", "needs the names of the studies of that file: [other]"),
        ("{recipe/studies.yaml: []}", "needs the names of the studies of that file: [other]"),
        ("{recipe/study.yaml: [other]}", "no file {folder}/recipe/study.yaml; did you mean"),
        ("[recipe/studies.yaml]", "files: needs a mapping of files to the names of their studies"),
    ],
)
def test_a_wrong_list_of_files_is_one_line(tmp_path: Path, files: str, message: str) -> None:
    path = with_files(tmp_path, files)
    with pytest.raises(ConfigError) as caught:
        read_studies(path)
    assert str(caught.value).startswith(f"{path}:1: files")
    assert message.format(folder=tmp_path) in str(caught.value)


def test_a_study_in_two_files_is_refused(tmp_path: Path) -> None:
    path = with_files(tmp_path, "{recipe/studies.yaml: [tiny]}")
    further = tmp_path / "recipe" / "studies.yaml"
    further.write_text(FURTHER.replace("other:", "tiny:"))
    with pytest.raises(ConfigError, match=r"studies\.yaml:3: tiny: this study is in .*ablations"):
        read_studies(path)
