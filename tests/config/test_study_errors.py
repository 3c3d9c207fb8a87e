"""Every mistake in a study is one line with its file, its line, its key and a remedy."""

import re
from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate.variants import resolve
from lit_attn.config.study import choose, read_studies
from lit_attn.data.base import Data
from lit_attn.models.base import Model
from lit_attn.schema.errors import ConfigError
from lit_attn.tasks.task import Task

CELLS = "baseline: a\ncells: {a: {}, b: {attention: belief2}}"


def read_mistakes(name: str) -> list[tuple[str, str]]:
    """Return pairs of a text and its error message."""
    blocks = (Path(__file__).parent / name).read_text().split("\n---\n")[1:]
    return [
        (body, message.strip()) for body, message in (block.split("\n>>> ") for block in blocks)
    ]


@pytest.mark.parametrize(("body", "message"), read_mistakes("study_mistakes.txt"))
def test_a_mistake_in_a_study_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, body))
    assert str(caught.value) == f"{tmp_path / 'ablations.yaml'}:{message}"


def test_an_exclusion_without_effect_is_refused(tmp_path: Path) -> None:
    body = """
baseline: zz=without,residual=full
axes: {zz: [with, without], residual: [full, value]}
exclude:
- {zz: with}
- {zz: with, residual: full}
- {zz: [], residual: full}
"""
    with pytest.raises(ConfigError, match=r":12: tiny.exclude.2: excludes no combination"):
        resolve(studies.study(tmp_path, body))


@pytest.fixture
def no_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the members of plug-ins that other tests have imported: errors would name them."""
    for family in (Data.family, Model.family, Task.family):
        for kind, member in list(family.items()):
            if not member.__module__.startswith("lit_attn."):
                monkeypatch.delitem(family, kind)


@pytest.mark.usefixtures("no_plug_ins")
@pytest.mark.parametrize(("change", "message"), read_mistakes("experiment_mistakes.txt"))
def test_a_mistake_in_an_experiment_is_one_line(tmp_path: Path, change: str, message: str) -> None:
    experiment = studies.EXPERIMENT.replace(*change.replace("\\n", "\n").split(" => "))
    with pytest.raises(ConfigError) as caught:
        resolve(studies.study(tmp_path, CELLS, experiment))
    assert str(caught.value) == f"{tmp_path / 'experiment.yaml'}:{message}"


def test_a_mistake_in_the_model_is_in_its_file_if_variants_choose_the_attention(
    tmp_path: Path,
) -> None:
    body = "baseline: a\ncells: {a: {attention: standard}, b: {attention: belief}}"
    experiment = studies.EXPERIMENT.replace("kind: vit", "kind: vt")
    with pytest.raises(ConfigError, match=r"experiment\.yaml:2: tiny: .* 'vt' is not a known"):
        resolve(studies.study(tmp_path, body, experiment))
    with pytest.raises(ConfigError, match=r"ablations\.yaml:\d: tiny: .*: 'belif' is not a preset"):
        resolve(studies.study(tmp_path, body.replace("belief", "belif")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("studies:", "study:", "1: a file of studies has no key 'study'; did you mean 'studies'?"),
        ("experiment.yaml", "x" * 999, "4: studies.tiny.experiment: no file "),
        ("seeds: 2", "seeds: [1, 1]", "6: studies.tiny.seeds: the seed 1 is written twice"),
        ("seeds: 2", "seeds: 0", "6: studies.tiny.seeds: 0 is not a number of seeds from"),
        ("seeds: 2", "seeds: 20251121", "6: studies.tiny.seeds: 20251121 is not a number of "
         "seeds from 1 to 10,000; for one seed write [20251121]"),
        ("seeds: 2", "seeds: five", "6: studies.tiny.seeds: needs a number of seeds, as 5, or a"),
        ("seeds: 2", "seeds: []", "6: studies.tiny.seeds: needs a number of seeds, as 5, or a"),
        ("seeds: 2", "seeds: [4294967296]", "6: studies.tiny.seeds.0: input should be less than"),
        ("seeds: 2", "seeds: [-1]", "6: studies.tiny.seeds.0: input should be greater than or"),
        ("tiny:", "../tiny:", "3: ../tiny: cannot name a folder"),
        ("tiny:", f"{'x' * 121}:", f"3: {'x' * 121}: cannot name a folder: use up to 120 letters"),
        ("title: A tiny study", "titel: x", "3: studies.tiny.titel: unknown key 'titel'; did you"),
        ("A tiny study", "!!python/object:os.system x", "3: the YAML tag 'tag:yaml.org,"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_head_of_a_study_is_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = studies.write(tmp_path, CELLS)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(f"{path}:{message}")) as caught:
        resolve(next(iter(read_studies(path).values())))
    assert "\n" not in str(caught.value)


def test_a_mistyped_experiment_gets_the_nearest_name(tmp_path: Path) -> None:
    path = studies.write(tmp_path, CELLS)
    path.write_text(path.read_text().replace("experiment.yaml", "experimnt.yaml"))
    with pytest.raises(ConfigError) as caught:
        read_studies(path)
    assert str(caught.value).startswith(f"{path}:4: studies.tiny.experiment: no file ")
    assert str(caught.value).endswith("experimnt.yaml; did you mean 'experiment.yaml'?")


def test_a_missing_file_and_an_unknown_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: No such file"):
        read_studies(tmp_path / "nowhere.yaml")
    path = studies.write(tmp_path, CELLS)
    with pytest.raises(ConfigError, match="no study 'tny'; did you mean 'tiny'"):
        choose(read_studies(path), ["tny"], path)
    path.write_text(path.read_text().replace("default: true", "default: false"))
    # The only study of a file needs no name.
    assert [study.name for study in choose(read_studies(path), [], path)] == ["tiny"]
