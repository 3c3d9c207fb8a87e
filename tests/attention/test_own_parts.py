"""Parts from a user's file: studies, cells and the benchmark accept them; a mistake is one line.

A registered part stays registered, so tests that register parts run in separate processes.
"""

import re
import sys
from pathlib import Path

import pytest
from helpers.commands import run_python
from helpers.paths import ROOT

from lit_attn.__main__ import main
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts
from lit_attn.training.provenance import code_hash

STUDY = """\
studies:
  mine:
    title: Residuals, mine among them
    experiment: {root}/experiments/digits_vit.yaml
    parts: [{parts}]
    seeds: 1
    set: {{training.epochs: 1, schedule: constant, model.depth: 1}}
    axes:
      residual: [full, {part}]
    baseline: full
"""


def page() -> str:
    """Return the code of docs/adding-a-part.md as one file."""
    text = (ROOT / "docs" / "adding-a-part.md").read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def study(folder: Path, parts: str = "reflected.py", part: str = "reflected") -> Path:
    path = folder / "mine.yaml"
    path.write_text(STUDY.format(root=ROOT, parts=parts, part=part))
    return path


@pytest.mark.process
def test_a_study_trains_a_part_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "reflected.py").write_text(page())
    study(tmp_path)
    done = run_python(tmp_path, "-m", "lit_attn.ablate", "mine.yaml", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = (tmp_path / "runs" / "mine" / "reflected").iterdir()
    first = Result.model_validate_json((cell / "result.json").read_text())
    # The code hash includes the file; the identity of the cell does not.
    assert first.code != code_hash([])
    # A cell names its parts by absolute paths, so it can be trained from any folder.
    (cell / "result.json").unlink()
    again = run_python(cell, "-m", "lit_attn.train", str(cell))
    assert again.returncode == 0, again.stdout + again.stderr
    assert (cell / "result.json").exists()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "reflected.py").rename(moved / "reflected.py")
    gone = run_python(tmp_path, "-m", "lit_attn.train", str(cell))
    message = f"{cell}/config.yaml: parts: {tmp_path}/reflected.py: no such file\n"
    assert (gone.returncode, gone.stderr) == (2, message)
    study(tmp_path, parts="elsewhere/reflected.py")
    preview = run_python(tmp_path, "-m", "lit_attn.ablate", "mine.yaml", "--dry-run")
    assert cell.name.removeprefix("0-") in preview.stdout


@pytest.mark.slow
def test_the_study_on_the_page_is_valid(tmp_path: Path) -> None:
    (tmp_path / "reflected.py").write_text(page())
    text = (ROOT / "docs" / "adding-a-part.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert main(["init", str(tmp_path)]) == 0
    (tmp_path / "mine.yaml").write_text(example)
    done = run_python(tmp_path, "-m", "lit_attn", "run", "mine.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "6 variants x 5 seeds = 30 cells" in done.stdout


SMALL = ["--batch", "2", "--tokens", "5", "--dim", "8", "--heads", "2", "--rounds", "2"]
SMALL += ["--modes", "eager", "--device", "cpu"]


@pytest.mark.process
def test_doctor_compares_the_parts_of_a_file_with_their_formulas(tmp_path: Path) -> None:
    """Each part is compared with its defaults, also if a preset has it beside another one."""
    text = re.sub(r"PRESETS\[.*\n", "", page())
    text += '\nPRESETS["both"] = AttentionSpec(residual=ReflectedConfig(), similarity="cosine")\n'
    wrong = text.replace("- 2 * residual", "- 3 * residual")
    for source, code in ((text, 0), (wrong, 1)):
        (tmp_path / "mine.py").write_text(source)
        arguments = ["--parts", "mine.py", "--short", "--device", "cpu"]
        done = run_python(tmp_path, "-m", "lit_attn.doctor", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        verdict = "FAILED residual=reflected, float64, causal: the value is off by"
        assert (verdict in done.stdout) == bool(code)
        assert "similarity=cosine, float64, not causal: holds, error " in done.stdout
        assert "standard" not in done.stdout
        assert "ms" not in done.stdout.split()
        (record,) = (tmp_path / "doctor").iterdir()
        assert record.name.endswith("-presets")
    missing = run_python(tmp_path, "-m", "lit_attn.doctor", "--parts", "other.py")
    assert missing.returncode == 2
    assert missing.stderr == f"{tmp_path}/other.py: no such file\n"


@pytest.mark.process
def test_the_benchmark_measures_the_parts_of_a_file(tmp_path: Path) -> None:
    """`cosine` is a similarity with a learned parameter."""
    (tmp_path / "mine.py").write_text(page())
    arguments = ["--parts", "mine.py", "--presets", "reflected", "cosine", *SMALL]
    done = run_python(tmp_path, "-m", "lit_attn.bench", "attention", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| reflected |" in done.stdout
    assert "| cosine |" in done.stdout


INHERITED = """
from typing import Literal

from lit_attn.attention.residual import SplitConfig
from lit_attn.attention.spec import PRESETS, AttentionSpec


class EagerConfig(SplitConfig, kind="eager"):
    activation: Literal["relu"] = "relu"


PRESETS["eager"] = AttentionSpec(residual=EagerConfig())
"""


@pytest.mark.process
def test_a_subclass_of_a_shipped_part_inherits_its_formula(tmp_path: Path) -> None:
    (tmp_path / "eager.py").write_text(INHERITED)
    arguments = ["--parts", "eager.py", "--short", "--device", "cpu"]
    done = run_python(tmp_path, "-m", "lit_attn.doctor", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "eager, float64, causal: holds, error " in done.stdout


def test_a_missing_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "reflected.py").touch()
    path = study(tmp_path, parts="reflekted.py")
    message = f"{path}:5: studies.mine.parts: no file {tmp_path}/reflekted.py; did you mean"
    with pytest.raises(ConfigError, match=re.escape(message + " 'reflected.py'?")):
        read_studies(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\nresidual = Residul\n", ":3: NameError: name 'Residul' is not defined"),
        ("def f(:\n", ":1: SyntaxError: invalid syntax"),
        ("import absent_beside_it\n", ":1: ModuleNotFoundError: No module named"),
        (
            "from typing import Literal\nfrom lit_attn.attention.residual import ResidualConfig\n"
            "class Mine(ResidualConfig):\n    kind: Literal['full'] = 'full'\n",
            ":3: class Mine: kind 'full' is already the name of lit_attn.attention.residual.Full",
        ),
        ("raise KeyError('two\\nlines')\n", ":1: KeyError: 'two"),
        ("raise ValueError('two\\nlines')\n", ":1: ValueError: two lines"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mistaken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}{message}")) as caught:
        load_parts([path])
    assert "\n" not in str(caught.value)
    assert "mistaken" not in sys.modules


def test_a_file_with_the_name_of_a_module_is_refused(tmp_path: Path) -> None:
    for name in ("json", "lit_attn", "this", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError")
        with pytest.raises(ConfigError, match=f"{name}.py: another module is called '{name}'"):
            load_parts([tmp_path / f"{name}.py"])


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("model: {kind: vit}")
    with pytest.raises(ConfigError, match=r"experiment\.yaml: is not a Python file"):
        load_parts([path])


def test_a_file_can_import_its_neighbours_and_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_my_part.py").write_text("LOADED = []")
    path = tmp_path / "a_part_of_mine.py"
    path.write_text("from beside_my_part import LOADED\nLOADED.append(1)")
    load_parts([path, path])
    load_parts([path])
    assert sys.modules["beside_my_part"].LOADED == [1]
    other = tmp_path / "below" / path.name
    other.parent.mkdir()
    other.write_text("")
    with pytest.raises(ConfigError, match="another module is called 'a_part_of_mine'"):
        load_parts([other])
    for name in ("beside_my_part", "a_part_of_mine"):
        monkeypatch.delitem(sys.modules, name)


def test_the_code_hash_is_that_of_the_loaded_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell ends with a result even if the file changes or disappears while it trains."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "a_part_that_goes.py"
    path.write_text("X = 1")
    load_parts([path])
    code = code_hash([path])
    assert code != code_hash([])
    path.write_text("X = 2")
    assert code_hash([path]) == code
    path.unlink()
    assert code_hash([path]) == code
    monkeypatch.delitem(sys.modules, path.stem)
    path.write_text("X = 2")
    load_parts([path])
    assert code_hash([path]) != code
    monkeypatch.delitem(sys.modules, path.stem)


@pytest.mark.parametrize("written", ["own.py", "3", "{a: 1}", "[3]"])
def test_an_invalid_list_of_files_in_a_cell_is_one_line(tmp_path: Path, written: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"study: s\nvariant: v\nseed: 0\nparts: {written}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: ")) as caught:
        Cell.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.process
def test_a_part_that_lacks_build_is_refused_in_one_line_by_a_plain_dry_run(tmp_path: Path) -> None:
    """With a preset in the same file, the import of the file finds the mistake."""
    build = "    def build(self, shape):\n        return Reflected(self, shape)\n"
    assert build in page()
    message = "residual: 'reflected' cannot be built: its class ReflectedConfig needs a method"
    for text in (page().split(build)[0], page().replace(build, "")):
        (tmp_path / "unfinished.py").write_text(text)
        study(tmp_path, parts="unfinished.py")
        done = run_python(tmp_path, "-m", "lit_attn.ablate", "mine.yaml", "--dry-run")
        assert done.returncode == 2
        assert message in done.stderr
        assert "pydantic" not in done.stderr
        assert done.stderr.count("\n") == 1


EMPTY = """\
from lit_attn.attention import {module}


class Empty({module}.{family}):
    pass


class EmptyConfig({module}.{member}, kind="empty"):
    def build(self, shape):
        return Empty(self, shape)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("key", "module", "family", "member", "method"),
    [
        ("residual", "residual", "Residual", "ResidualConfig", "forward"),
        ("similarity", "similarity", "Similarity", "SimilarityConfig", "features"),
    ],
)
def test_a_module_that_lacks_its_method_is_refused_in_one_line_by_a_plain_dry_run(
    tmp_path: Path, key: str, module: str, family: str, member: str, method: str
) -> None:
    text = EMPTY.format(module=module, family=family, member=member)
    (tmp_path / "unfinished.py").write_text(text)
    path = study(tmp_path, parts="unfinished.py", part="empty")
    if key != "residual":
        text = path.read_text().replace("residual: [full, empty]", f"{key}: [empty]")
        path.write_text(text.replace("baseline: full", "baseline: empty"))
    done = run_python(tmp_path, "-m", "lit_attn.ablate", "mine.yaml", "--dry-run")
    assert done.returncode == 2
    assert f"'empty': its module Empty needs a method `{method}`" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.process
def test_doctor_names_a_missing_reference_in_one_line(tmp_path: Path) -> None:
    text = page().replace("def reference(self, module, x, h, v, project)", "def formula_of(self)")
    (tmp_path / "unfinished.py").write_text(text)
    arguments = ["--parts", "unfinished.py", "--presets", "reflected", "--short", "--device", "cpu"]
    done = run_python(tmp_path, "-m", "lit_attn.doctor", *arguments)
    assert done.returncode == 2
    message = "'reflected' cannot be compared with its formula: its class ReflectedConfig needs"
    assert done.stderr.startswith(f"{message} a method `reference`")
    assert done.stderr.count("\n") == 1


@pytest.mark.process
def test_parameters_of_a_part_without_device_are_counted_on_the_meta_device(tmp_path: Path) -> None:
    (tmp_path / "reflected.py").write_text(page())
    study(tmp_path, part="gated")
    done = run_python(tmp_path, "-m", "lit_attn.ablate", "mine.yaml", "--dry-run", "--params")
    assert done.returncode == 0, done.stderr
