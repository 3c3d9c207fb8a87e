"""JSON schemas for editors: they accept every shipped file, and mark what the readers refuse."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_python
from helpers.paths import ROOT
from jsonschema import Draft202012Validator

from lit_attn.config.source import load

pytestmark = pytest.mark.process

PLUGINS = sorted(
    path
    for path in ROOT.glob("experiments/*/*.py")
    if "Config, kind=" in path.read_text() or ", kind=" in path.read_text()
)


@cache
def validators() -> dict[str, Draft202012Validator]:
    """Return the validators with the members of all shipped plug-ins, from new processes."""
    schemas = {}
    parts = [word for path in PLUGINS for word in ("--parts", str(path))]
    for name in ("experiment", "study"):
        printed = run_python(ROOT, "-m", "lit_attn", "schema", name, *parts)
        assert printed.returncode == 0, printed.stderr
        schema = json.loads(printed.stdout)
        Draft202012Validator.check_schema(schema)
        schemas[name] = Draft202012Validator(schema)
    return schemas


def read(path: Path) -> Any:
    """Return the content of a YAML file as JSON would hold it."""
    return json.loads(json.dumps(load(path)))


def problems(name: str, tree: Any) -> list[str]:
    return [error.json_path for error in validators()[name].iter_errors(tree)]


def test_every_shipped_file_is_valid() -> None:
    number = 0
    folders = (ROOT / "experiments", ROOT / "lit_attn" / "starter")
    files = [path for folder in folders for path in folder.rglob("*.yaml")]
    for path in [ROOT / "ablations.yaml", *files]:
        if "harness_tasks" in path.parts or path.parent.name == "papers":
            continue
        tree = read(path)
        name = "study" if "studies" in tree else "experiment"
        if name == "experiment" and "model" not in tree:
            continue
        number += 1
        assert problems(name, tree) == [], path
    assert number > 30


EXPERIMENT = ROOT / "experiments" / "digits_vit.yaml"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"training": {"epochs": 1, "epoch": 2}}, "$.training"),
        ({"training": {"epochs": "many"}}, "$.training.epochs"),
        ({"training": {}}, "$.training"),
        ({"optimizer": {"kind": "adamv", "lr": 1.0}}, "$.optimizer"),
        ({"trainig": {}}, "$"),
    ],
)
def test_a_mistake_is_marked(changes: dict[str, Any], place: str) -> None:
    assert problems("experiment", read(EXPERIMENT) | changes) == [place]


@pytest.mark.parametrize(
    "attention",
    [
        "belief2",
        {"preset": "mgk", "zz": "with"},
        {"residual": {"kind": "projected", "scope": "both"}},
        {"layers": [{"last": 1, "use": "xsa"}]},
        {"kind": "module", "import": "mine:Mixer", "arguments": {"a": 1}},
    ],
)
def test_the_forms_of_a_choice_are_valid(attention: Any) -> None:
    tree = read(EXPERIMENT)
    tree["model"] |= {"attention": attention, "ffn": "none"}
    tree["training"] |= {"loggers": ["csv", {"kind": "wandb", "project": "p"}]}
    tree["training"] |= {"callbacks": [{"kind": "module", "import": "lightning:Callback"}]}
    assert problems("experiment", tree) == []
    tree["model"]["attention"] = "belief3"
    assert problems("experiment", tree) == ["$.model"]


def test_the_keys_of_a_variant_and_of_a_study_are_known() -> None:
    schema = validators()["study"].schema
    override = schema["$defs"]["Override"]["properties"]
    assert {"attention", "optimizer.lr", "residual", "training.callbacks"} <= override.keys()
    assert override["optimizer.lr"]["description"].startswith("peak learning rate")
    study = read(ROOT / "lit_attn" / "starter" / "ablations.yaml")
    study["studies"]["first"]["seed"] = study["studies"]["first"].pop("seeds")
    assert problems("study", study) == ["$.studies.first"]
