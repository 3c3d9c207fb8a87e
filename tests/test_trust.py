"""A file does not run code unasked: downloaded runs, exported folders, and classes of a study."""

import contextlib
import copy
import io
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
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.yaml_text import format_yaml
from lit_attn.study import Study

METRIC = {"name": "test/accuracy", "label": "accuracy", "goal": "max", "scale": 100}
SYSTEM = {"kind": "module", "import": "os:system", "arguments": {"command": "touch executed"}}


def plain_values() -> dict[str, Any]:
    """Return the plain values of a cell without code."""
    values = digits_cell().model_dump(mode="json")
    values["match_to"] = values["experiment"]["model"]
    return values


def add_model(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["model"] = {"kind": "module", "import": code}


def add_target(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["model"] = {"kind": "module", "target": code, "arguments": {}}


def add_both_keys(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["model"] = {"kind": "module", "target": "torch.nn:Linear", "import": code}


def add_match(values: dict[str, Any], code: Any) -> None:
    values["match_to"] = {"kind": "module", "import": code}


def add_task(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["task"] = {"kind": "module", "target": code}


def add_metric(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["metrics"] = [{"name": "MulticlassF1Score"}, {"name": code}]


def add_kind_of_metric(values: dict[str, Any], code: Any) -> None:
    values["experiment"]["metrics"] = [{"name": code, "kind": "torchmetrics", "record_as": "x"}]


def add_part(values: dict[str, Any], code: Any) -> None:
    values["parts"] = [f"{str(code).partition(':')[0]}.py"]


def add_part_as_text(values: dict[str, Any], code: Any) -> None:
    values["parts"] = f"{str(code).partition(':')[0]}.py"


ADDITIONS = (add_model, add_target, add_both_keys, add_match, add_task, add_part, add_part_as_text)
METRIC_ADDITIONS = (add_metric, add_kind_of_metric)
MODULES = ("evil", "evil-net", "évil", "evil.py", "evil net", "эvil", "pkg.evil-net", "pkg.evil")
NAMES = (*(f"{name}:Net" for name in MODULES), "evil:", "evil::Net", "evil:Net:x", "evil:Néť")
WITHOUT_COLON = ("evil", "evil-net", "évil")


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file that the modules on the search path write when they are imported."""
    mark = tmp_path / "executed"
    folder = tmp_path / "modules"
    (folder / "pkg").mkdir(parents=True)
    for name in MODULES:
        file = folder / (name.replace("pkg.", "pkg/") + ".py")
        file.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = set(sys.modules)
    yield mark
    experiment._try_member.cache_clear()
    for name in set(sys.modules) - before:
        if "vil" in name or name == "pkg":
            del sys.modules[name]


def write_run(folder: Path, values: Any) -> Path:
    """Write the values as a downloaded run and as an exported folder."""
    folder.mkdir(exist_ok=True)
    text = format_yaml(values)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def require_refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Open the folder with each command that reads runs; each must refuse it in one line."""
    with pytest.raises(ConfigError) as caught:
        load_exported(folder)
    assert "trust_code=True" in str(caught.value)
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--trust-code" in line
    assert main(["export", "hub", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--trust-code" in line or "cannot be exported" in line


@pytest.mark.parametrize("add", [*ADDITIONS, *METRIC_ADDITIONS], ids=lambda add: add.__name__)
def test_a_downloaded_run_with_code_is_refused_before_the_code_is_imported(
    add: Any, executed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(NAMES)
    if add not in METRIC_ADDITIONS:
        names += WITHOUT_COLON
    for name in names:
        values = plain_values()
        add(values, name)
        require_refusal(write_run(tmp_path / "run", values), capsys)
        assert not executed.exists(), name


def layer_of(key: str, code: str) -> dict[str, Any]:
    return {"mixer": {key: code}}


def module_of(key: str, code: str) -> dict[str, Any]:
    return {"kind": "module", key: code, "arguments": {}}


def list_attentions(layer: dict[str, Any], others: list[Any]) -> list[Any]:
    """Return each way to write a model's attention with `layer` as its last layer or everywhere."""
    return [
        layer,
        layer | {"preset": "standard"},
        {"layers": [*others, layer]},
        {"preset": "belief2", "layers": [*others, layer]},
        {"layers": [*others, {"use": layer}]},
        {"layers": layer},
        {"layers": {"last": 1, "use": layer}},
        {"layers": [{"every": 2, "use": layer}, {"last": 1, "use": "xsa"}]},
        {"layers": {"last": 1} | layer},
        {"layers": {"use": {"layers": [*others, layer]}}},
    ]


def list_hidden_code() -> list[dict[str, Any]]:
    """Return runs with code in each shorthand of the attention of each kind of model."""
    runs = []
    plain = plain_values()
    vit = plain["experiment"]["model"]
    others = ["standard"] * (vit["depth"] - 1)
    arguments = {"patch_size": 4, "embed_dim": 16, "depth": vit["depth"], "num_heads": 2}
    timm = {"kind": "timm", "name": "vit_tiny_patch16_224", "arguments": arguments}
    for model in (vit, timm):
        for layer in (layer_of("import", "evil:Net"), module_of("target", "evil:Net")):
            for attention in list_attentions(layer, others):
                values = copy.deepcopy(plain)
                values["experiment"]["model"] = model | {"attention": attention}
                runs.append(values)
                values = copy.deepcopy(plain)
                values["match_to"] = model | {"attention": attention}
                runs.append(values)
    module = module_of("import", "evil:Net")
    for key in ("optimizer", "schedule", "loss", "task", "data"):
        values = copy.deepcopy(plain)
        values["experiment"][key] = module
        runs.append(values)
    for key in ("ffn", "attention"):
        values = copy.deepcopy(plain)
        values["experiment"]["model"][key] = {"width": 8} | module
        runs.append(values)
    values = copy.deepcopy(plain)
    values["metric"] = {"name": "evil:Net"}
    values["experiment"]["metrics"] = [{"name": "evil:Net", "record_as": "x"}]
    return [*runs, values]


HIDDEN_CODE = list_hidden_code()


@pytest.mark.parametrize("values", HIDDEN_CODE, ids=range(len(HIDDEN_CODE)))
@pytest.mark.parametrize("finds_code", [True, False])
def test_no_shorthand_hides_code_from_the_guard(
    values: Any,
    finds_code: bool,
    executed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import itself refuses code, whether or not the search before it has found the code."""
    if not finds_code:
        monkeypatch.setattr(Cell, "find_code", lambda values: {})
    folder = write_run(tmp_path / "run", values)
    write_weights(folder, values)
    with pytest.raises(ConfigError):
        load_exported(folder)
    for command in (["generate", str(folder), "--prompt", "a"], ["export", "hub", str(folder)]):
        assert main(command) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not executed.exists()


def write_weights(folder: Path, values: Any) -> None:
    """Write weights, so that the commands reach the network."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    for name in ("model.safetensors", "checkpoints/weights.pt", "checkpoints/averaged.pt"):
        (folder / name).touch()


def test_a_refusal_that_is_caught_still_ends_the_reading(executed: Path, tmp_path: Path) -> None:
    """Some checks catch every error of foreign code, and the network is built later."""
    with (
        pytest.raises(ConfigError, match=r"x\.yaml: this run executes the code in import: evil"),
        plugins.refuse_code("x.yaml", "add --trust-code"),
        contextlib.suppress(ConfigError),
    ):
        import_class("evil:Net", "torch.nn:Module")
    with (
        pytest.raises(ConfigError, match=r"the code in .*evil\.py\. If you trust it, add --trust"),
        plugins.refuse_code("x.yaml", "add --trust-code"),
    ):
        plugins.load_parts([tmp_path / "modules" / "evil.py"])
    assert not executed.exists()
    # Outside, code is imported as before.
    with contextlib.suppress(ConfigError):
        import_class("evil:Net", "torch.nn:Module")
    assert executed.exists()


def test_code_of_a_match_is_refused_when_the_network_is_built(
    executed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation of a cell imports nothing for `match_to`."""
    monkeypatch.setattr(Cell, "find_code", lambda values: {})
    values = plain_values()
    values["match_to"] = values["experiment"]["model"] | {"attention": layer_of("import", "evil:N")}
    folder = write_run(tmp_path / "run", values)
    write_weights(folder, values)
    with pytest.raises(ConfigError, match="the code in import: evil:N"):
        load_exported(folder)
    assert not executed.exists()


@pytest.mark.parametrize("command", ["report", "judge", "status", "logs"])
def test_commands_that_read_records_import_nothing(
    command: str, executed: Path, tmp_path: Path
) -> None:
    values = plain_values()
    add_model(values, "evil:Net")
    values["parts"] = [str(tmp_path / "modules" / "pkg.evil.py")]
    study = fake_study.write_study(tmp_path / "runs", seeds=2)
    for result in study.rglob("result.json"):
        write_run(result.parent, values)
    words = [str(study)] if command == "logs" else [str(tmp_path / "runs")]
    main([command, *words])
    assert not executed.exists()


@pytest.mark.process
@pytest.mark.parametrize(
    "words", [["generate", "run", "--prompt", "a"], ["export", "hub", "run", "--out", "out"]]
)
def test_python_m_executes_nothing_from_the_working_directory(
    words: list[str], tmp_path: Path
) -> None:
    """`python -m` puts the working directory on the search path, and a download may lie in it."""
    values = plain_values()
    depth = values["experiment"]["model"]["depth"]
    layers = [*["standard"] * (depth - 1), layer_of("import", "evil:Net")]
    values["experiment"]["model"]["attention"] = {"layers": layers}
    write_run(tmp_path / "run", values)
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    done = run_python(tmp_path, "-m", "lit_attn", *words)
    assert done.returncode == 2
    assert "--trust-code" in done.stderr
    assert not (tmp_path / "executed").exists()


def test_a_trusted_run_imports_its_code(executed: Path, tmp_path: Path) -> None:
    """Without this the tests above would pass for modules that cannot be imported."""
    for add in (add_model, add_task, add_metric, add_part):
        for name in ("evil-net:Net", "évil:Net"):
            values = plain_values()
            add(values, str(tmp_path / "modules" / name) if add is add_part else name)
            folder = write_run(tmp_path / "run", values)
            sys.modules.pop(name.partition(":")[0], None)
            with pytest.raises(ConfigError):
                load_exported(folder, trust_code=True)
            assert executed.exists(), (add, name)
            executed.unlink()


def test_the_answer_of_the_user_decides(
    executed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = plain_values()
    add_model(values, "evil-net:Net")
    folder = write_run(tmp_path / "run", values)
    for answer, is_executed in (("n\n", False), ("", False), ("yes\n", True)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdin", terminal)
        assert main(["export", "hub", str(folder)]) == 2
        error = capsys.readouterr().err
        assert "experiment.model.import: this run executes the code in 'evil-net:Net'" in error
        assert ("Nothing was executed." in error) is not is_executed
        assert executed.exists() is is_executed


@pytest.mark.parametrize(
    "text",
    [
        "model: &m {kind: module, import: 'evil-net:Net'}\ntask: image-classification\n",
        "model: {<<: {kind: module}, import: 'evil-net:Net'}\n",
        "model: {<<: [{kind: vit}, {import: 'evil-net:Net'}], kind: module}\n",
        "model: {kind: &k module, target: !!str 'evil-net:Net'}\ntask: {kind: *k, import: x}\n",
        'model: {"kind": "mod\\x75le", "imp\\u006frt": "evil-net:Net"}\n',
        "model:\n  kind: >-\n    module\n  import: |-\n    evil-net:Net\n",
        "model: {kind: vit}\nmetrics: [{name: Accuracy}, {<<: {name: 'evil-net:Net'}}]\n",
    ],
)
def test_yaml_cannot_hide_code(
    text: str, executed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = plain_values()
    recipe = values.pop("experiment")
    for key in ("model", "task", "metrics"):
        if f"{key}:" in text:
            del recipe[key]
    lines = format_yaml(recipe) + text
    inner = "".join(f"  {line}\n" for line in lines.splitlines())
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(format_yaml(values) + "experiment:\n" + inner)
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this run executes the code in" in line
    assert not executed.exists()


def test_a_key_that_is_written_twice_hides_no_code(executed: Path, tmp_path: Path) -> None:
    values = plain_values()
    text = json.dumps(values)
    code = '{"kind": "module", "import": "evil-net:Net"}'
    twice = text.replace('"model": ', f'"model": {code}, "model": ', 1)
    last = text.replace('"match_to": ', f'"match_to": {code}, "match_to": ', 1)
    for hostile in (twice, last):
        (tmp_path / "config.json").write_text(hostile)
        with pytest.raises(ConfigError, match="is written twice"):
            load_exported(tmp_path)
    assert not executed.exists()


def test_look_alikes_are_unknown_keys_and_kinds(executed: Path, tmp_path: Path) -> None:
    for key, kind in (("\uff49mport", "module"), ("import", "m\u043edule"), ("Import", "module")):
        values = plain_values()
        values["experiment"]["model"] = {"kind": kind, key: "evil-net:Net"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError):
            load_exported(tmp_path)
    assert not executed.exists()


def test_runs_without_code_are_opened_without_a_question(tmp_path: Path) -> None:
    """Values that look like code, at places where nothing is imported, are no reason to ask."""
    values = text_cell().model_dump(mode="json")
    values["experiment"]["data"]["name"] = "os:system"
    values["study"] = "import:os"
    translation = {"kind": "parallel-text", "name": "a:b", "folder": "/x", "target": "en"}
    assert Cell.find_code(values) == {}
    assert Cell.find_code({"experiment": {"data": translation}}) == {}
    timm = {"kind": "timm", "name": "vit_tiny_patch16_224", "arguments": {"import": "a:b"}}
    assert Cell.find_code({"experiment": {"model": timm}}) == {}
    (tmp_path / "config.yaml").write_text(format_yaml(values))
    with Cell.open_foreign(tmp_path / "config.yaml", is_trusted=False) as cell:
        assert cell == Cell.parse(values, "")


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
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_validation_imports_nothing_that_the_search_has_not_reported(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Code is imported only if `find_code` has named it before, for every content of a file."""
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
    code = Cell.find_code(values)
    with contextlib.suppress(ConfigError):
        Cell.parse(values, "file")
    assert not imported or code


BASE = plain_values()
BASE["experiment"]["metrics"] = [{"name": "MulticlassF1Score"}]


@pytest.mark.parametrize("key", ["model", "task", "metrics"])
def test_a_study_calls_no_function_of_a_package(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class is checked before anything is called, in a dry run, a seal and `Study`."""
    monkeypatch.chdir(tmp_path)
    value: Any = SYSTEM
    if key == "metrics":
        value = [{"name": "os:system", "arguments": {"command": "touch executed"}}]
    body = f"baseline: a\nmatch: none\ncells: {{a: {{}}, b: {{{key}: {json.dumps(value)}}}}}"
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
