"""A file does not run code unasked: downloaded runs, exported folders, and classes of a study."""

import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_study, studies
from helpers.commands import run_python
from helpers.training_cells import digits_cell, text_cell
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_attn.__main__ import main
from lit_attn.ablate.plan import expand
from lit_attn.config import experiment
from lit_attn.config.cell import Cell
from lit_attn.hub import load_exported
from lit_attn.schema import own_classes, plugins
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.study import Study

METRIC = {"name": "test/accuracy", "label": "accuracy", "goal": "max", "scale": 100}
SYSTEM = {"kind": "module", "import": "os:system", "arguments": {"command": "touch executed"}}
MODULE = {"kind": "module", "import": "evil:Net", "arguments": {}}
TARGET = {"kind": "module", "target": "evil:Net", "arguments": {}}
LAYER = {"mixer": {"import": "evil:Net"}}


def plain_values(cell: Cell | None = None) -> dict[str, Any]:
    """Return the plain values of a cell without code, by default one of image classification."""
    values = (cell or digits_cell()).model_dump(mode="json")
    values["match_to"] = values["experiment"]["model"]
    return values


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file that the modules on the search path write when they are imported."""
    mark = tmp_path / "executed"
    folder = tmp_path / "modules"
    folder.mkdir()
    for name in ("evil", "evil-net"):
        file = folder / f"{name}.py"
        file.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    yield mark
    experiment._try_member.cache_clear()
    for name in ("evil", "evil-net"):
        sys.modules.pop(name, None)


def write_run(folder: Path, values: Any) -> Path:
    """Write the values as a downloaded run and as an exported folder, with empty weights."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    text = format_yaml(values)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    for name in ("model.safetensors", "checkpoints/weights.pt", "checkpoints/averaged.pt"):
        (folder / name).touch()
    return folder


def list_code(cell: Cell) -> list[dict[str, Any]]:
    """Return copies of a cell's values with code in each place where a file can name it."""
    runs = []

    def add(path: str, value: Any) -> None:
        values = plain_values(cell)
        *keys, last = path.split(".")
        part = values
        for key in keys:
            part = part[key]
        part[last] = value
        runs.append(values)

    for path in ("experiment.model", "match_to"):
        for value in (MODULE, TARGET, {"kind": "mmseg", "config": "modules/evil.py"}):
            add(path, value)
    for key in ("optimizer", "schedule", "loss", "task", "data", "model.ffn", "model.attention"):
        add(f"experiment.{key}", MODULE)
    add("experiment.training.callbacks", [MODULE])
    add("experiment.metrics", [{"name": "evil:Net", "record_as": "x"}])
    add("metric", {"name": "evil:Net"})
    for parts in (["modules/evil.py"], "modules/evil.py"):
        add("parts", parts)
        runs[-1]["experiment"]["model"] = {"kind": "evil"}
    depth = plain_values(cell)["experiment"]["model"]["depth"]
    others = ["standard"] * (depth - 1)
    for attention in (
        LAYER,
        LAYER | {"preset": "standard"},
        {"layers": [*others, LAYER]},
        {"layers": [*others, {"use": LAYER}]},
        {"layers": {"last": 1, "use": LAYER}},
        {"layers": {"last": 1} | LAYER},
    ):
        add("experiment.model.attention", attention)
        add("match_to.attention", attention)
    return runs


@pytest.mark.parametrize("door", ["load_exported", "generate", "export"])
def test_a_foreign_file_executes_no_code(
    door: str, executed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code that the network needs is refused, and other code is not imported."""
    for values in list_code(text_cell() if door == "generate" else digits_cell()):
        folder = write_run(tmp_path / "run", values)
        if door == "load_exported":
            with pytest.raises(ConfigError):
                load_exported(folder)
        else:
            words = {"generate": ["--prompt", "a"], "export": []}[door]
            command = [door, "hub"] if door == "export" else [door]
            assert main([*command, str(folder), *words]) == 2
            assert len(capsys.readouterr().err.splitlines()) == 1
        assert not executed.exists(), values


def test_the_code_of_a_network_needs_trust(executed: Path, tmp_path: Path) -> None:
    """Without trust one line names the code and what to do; with trust the code is imported."""
    values = plain_values()
    values["experiment"]["model"] = MODULE
    named = [(values, "import: evil:Net")]
    values = plain_values()
    values["experiment"]["model"]["attention"] = LAYER
    named.append((values, "import: evil:Net"))
    values = plain_values() | {"parts": ["../modules/evil.py"]}
    values["experiment"]["model"] = {"kind": "evil"}
    named.append((values, "parts: "))
    for values, code in named:
        sys.modules.pop("evil", None)
        folder = write_run(tmp_path / "run", values)
        message = rf"config\.json: this run executes the code in {code}.*set trust_code=True\."
        with pytest.raises(ConfigError, match=message):
            load_exported(folder)
        assert not executed.exists()
        with pytest.raises(ConfigError):
            load_exported(folder, trust_code=True)
        assert executed.exists()
        executed.unlink()


def test_commands_that_read_records_import_nothing(executed: Path, tmp_path: Path) -> None:
    values = plain_values()
    values["experiment"]["model"] = MODULE
    values["parts"] = [str(tmp_path / "modules" / "evil.py")]
    study = fake_study.write_study(tmp_path / "runs", seeds=2)
    for result in study.rglob("result.json"):
        write_run(result.parent, values)
    for command in ("report", "judge", "status", "logs"):
        main([command, str(study) if command == "logs" else str(tmp_path / "runs")])
        assert not executed.exists(), command


@pytest.mark.process
def test_python_m_executes_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """`python -m` puts the working directory on the search path, and a download may lie in it."""
    values = plain_values(text_cell())
    values["experiment"]["model"]["attention"] = LAYER
    write_run(tmp_path / "run", values)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    done = run_python(tmp_path, "-m", "lit_attn", "generate", "run", "--prompt", "a")
    assert done.returncode == 2
    assert "--trust-code" in done.stderr
    assert not (tmp_path / "executed").exists()


def test_runs_without_needed_code_are_opened(tmp_path: Path) -> None:
    """Text that looks like code, and code that no network needs, are no reason to refuse a run."""
    values = text_cell().model_dump(mode="json")
    values["experiment"]["data"]["name"] = "os:system"
    values["study"] = "import:os"
    values["parts"] = ["mine.py"]
    values["experiment"]["optimizer"] = {"kind": "module", "import": "mine:Lion", "lr": 0.1}
    values["experiment"]["training"]["callbacks"] = [{"kind": "module", "import": "mine:Counter"}]
    (tmp_path / "config.yaml").write_text(format_yaml(values))
    with Cell.open_foreign(tmp_path / "config.yaml", is_trusted=False) as cell:
        assert cell.model_dump(mode="json")["experiment"]["data"]["name"] == "os:system"


CODE = "evil-net:Net"
SNIPPETS: st.SearchStrategy[Any] = st.sampled_from(
    [
        CODE, "évil", "module", "torchmetrics", None, 1, True, [], {}, [CODE], {"kind": "module"},
        {"kind": "module", "import": CODE}, {"kind": "module", "target": CODE},
        {"import": CODE}, {"target": CODE}, {"name": CODE}, [{"name": CODE}], {"name": [CODE]},
        {"kind": ["module"], "import": CODE}, {"kind": "timm", "name": CODE},
        {"kind": "module", "import": CODE, "measures": ["loss"]}, {"preset": {"import": CODE}},
        {"kind": "transformers", "architecture": CODE}, ["evil.py"], "evil.py",
        {"kind": "cross-entropy", "import": CODE}, {"attention": {"kind": "x", "import": CODE}},
    ]
)  # fmt: skip


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in `value` with each of its keys or indices."""
    places = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        places.append((value, key))
        if isinstance(item, dict | list):
            places += list_places(item)
    return places


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_content_of_a_foreign_file_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: st.DataObject
) -> None:
    imported: list[object] = []

    def refuse(*arguments: object) -> None:
        imported.append(arguments)
        raise ConfigError("not imported in this test")

    monkeypatch.setattr(own_classes, "import_module", refuse)
    monkeypatch.setattr(plugins, "_import_file", refuse)
    values = copy.deepcopy(BASE)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list_places(values)))
        snippet = copy.deepcopy(data.draw(SNIPPETS))
        if isinstance(container, dict):
            new_keys = st.sampled_from(
                [key, "import", "target", "kind", "parts", "metrics", "task"]
            )
            container[data.draw(new_keys)] = snippet
        else:
            container[key] = snippet
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with contextlib.suppress(ConfigError), Cell.open_foreign(path, is_trusted=False):
        pass
    assert not imported


BASE = plain_values()
BASE["experiment"]["metrics"] = [{"name": "MulticlassF1Score"}]


def test_a_study_calls_no_function_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class is checked before anything is called, in a dry run, a seal and `Study`."""
    monkeypatch.chdir(tmp_path)
    body = f"baseline: a\nmatch: none\ncells: {{a: {{}}, b: {{model: {json.dumps(SYSTEM)}}}}}"
    path = studies.write(tmp_path, body)
    for command in (["run", str(path), "--dry-run"], ["seal", str(path)]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "os:system is not a subclass of " in line
    with pytest.raises(ConfigError, match="os:system is not a subclass of "):
        Study.from_yaml(path)
    with pytest.raises(ConfigError, match="os:system is not a subclass of "):
        expand(next(iter(studies.read_studies(path).values())), tmp_path / "runs")
    assert not (tmp_path / "executed").exists()
