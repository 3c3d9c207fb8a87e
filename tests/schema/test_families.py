"""The base of configurations: kinds, identities, errors in one line, YAML with lines, cells."""

from pathlib import Path
from typing import Literal

import pytest
from helpers import studies
from pydantic import ValidationError

from lit_attn.ablate.plan import expand
from lit_attn.config.augment import CropConfig, FlipConfig, NormalizeConfig
from lit_attn.config.cell import Cell
from lit_attn.config.data.base import Data
from lit_attn.config.data.images import Cifar10, Digits
from lit_attn.config.optimizers import AdamW, Optimizer
from lit_attn.config.source import Mapping, Sequence, Where, load, locate, parse_value
from lit_attn.schema.base import Config, Kind, outside_identity
from lit_attn.schema.errors import ConfigError, explain, suggest


class Shape(Kind):
    """A family for these tests."""


class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: float = 1.0
    colour: Literal["red", "green"] = "red"


class Drawing(Config):
    shape: Shape = Circle()
    layers: tuple[Shape, ...] = ()
    file: Path = outside_identity(Path("here"), "where it lies")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("circle", Circle()),
        ({"kind": "circle", "radius": 2}, Circle(radius=2)),
        (Circle(radius=3), Circle(radius=3)),
    ],
)
def test_a_kind_is_a_name_a_mapping_or_itself(value: object, expected: Circle) -> None:
    assert Drawing.model_validate({"shape": value}).shape == expected


def said(**written: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(written)
    return str(explain(caught.value, "a.yaml"))


def test_one_line_for_every_mistake() -> None:
    assert said(shap=1) == "a.yaml: shap: unknown key 'shap'; did you mean 'shape'?"
    assert said(shape="circl") == (
        "a.yaml: shape: 'circl' is not a known shape; did you mean 'circle'?"
    )
    assert said(shape={"radius": 1}) == "a.yaml: shape: needs a kind; choose from circle"
    assert said(shape=3) == "a.yaml: shape: needs a kind; choose from circle"
    assert said(layers=["circle", {"kind": "circle", "radus": 1}]) == (
        "a.yaml: layers.1.radus: unknown key 'radus'; did you mean 'radius'?"
    )
    assert said(shape={"kind": "circle", "colour": "reed"}) == (
        "a.yaml: shape.colour: 'reed' is not a choice; did you mean 'red'?"
    )
    assert said(shape={"kind": "circle", "radius": float("inf")}) == (
        "a.yaml: shape.radius: input should be a finite number, not inf"
    )
    long = said(shape={"kind": "circle", "radius": "9" * 999 + "x"})
    assert "\n" not in long
    assert len(long) < 200


def test_identity_holds_what_differs_from_the_defaults() -> None:
    assert Drawing().identity() == {}
    assert Drawing(shape=Circle(), file=Path("elsewhere")).identity() == {}
    assert Drawing(shape=Circle(radius=2)).identity() == {"shape": {"kind": "circle", "radius": 2}}
    assert Drawing(layers=(Circle(),)).identity() == {"layers": [{"kind": "circle"}]}


def test_asking_for_an_identity_changes_nothing() -> None:
    """It is kept on the instance, where equality, hashing and dumps must not see it."""
    asked, other = Circle(radius=2), Circle(radius=2)
    asked.identity()
    assert asked == other
    assert hash(asked) == hash(other)
    assert asked.model_dump() == other.model_dump()
    assert asked.model_copy(update={"radius": 3.0}) == Circle(radius=3)


def test_a_configuration_never_changes() -> None:
    with pytest.raises(ValidationError):
        Digits().batch_size = 3


def test_paths_of_data_are_outside_identity() -> None:
    assert Cifar10(root=Path("a")).identity() == Cifar10(root=Path("b")).identity()
    flipped, cropped = ((step, NormalizeConfig()) for step in (FlipConfig(), CropConfig()))
    assert Digits(augment=flipped).identity() != Digits(augment=cropped).identity()


def test_suggest_names_the_nearest_choice() -> None:
    assert suggest("heds", ["heads", "depth"]) == "; did you mean 'heads'?"
    assert suggest("zzz", ["heads", "depth"]) == "; choose from heads, depth"
    assert suggest("zzz", []) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.5E+3", 1500.0), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("010", 10),
        ("no", "no"), ("on", "on"), ("y", "y"), ("true", True), ("False", False), ("", None),
        ("~", None), ("null", None), ("12:30:00", "12:30:00"), ("2020-01-01", "2020-01-01"),
        ("0x10", "0x10"), ("1_000", "1_000"), (".inf", ".inf"), ("'3'", "3"), ("[1, a]", [1, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_scalars_are_yaml_1_2(text: str, value: object) -> None:
    found = parse_value(text, "there")
    assert found == value
    assert type(found) is type(value) or isinstance(found, Mapping | Sequence)


def read(folder: Path, text: str) -> Mapping:
    path = folder / "a.yaml"
    path.write_text(text)
    return load(path)


def test_lines(tmp_path: Path) -> None:
    tree = read(tmp_path, "a:\n  b:\n    - 1\n    - c: 2\nd: {e: 3}\n")
    file = str(tmp_path / "a.yaml")
    for keys, line in [
        (("a",), 1), (("a", "b"), 2), (("a", "b", 0), 3), (("a", "b", 1, "c"), 4),
        (("d", "e"), 5), (("a", "b", 7), 2), (("a", "nothing"), 1), ((), 1),
    ]:  # fmt: skip
        assert locate(tree, keys) == Where(file, line)
    assert locate({"a": 1}, ["a"]) is None


def test_merged_keys(tmp_path: Path) -> None:
    tree = read(
        tmp_path, "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  x: 0\n  <<: [*a, *b]\n  z: 5\n"
    )
    assert tree["c"] == {"x": 0, "y": 2, "z": 5}
    assert list(tree["c"]) == ["x", "y", "z"]
    assert [tree["c"].where[key].line for key in "xyz"] == [4, 1, 6]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", ":2: 'a' is written twice, first on line 1"),
        ("b: &b {a: 1}\nc:\n  <<: *b\n  a: 2\n  a: 3", ":5: 'a' is written twice"),
        ("- 1", ": needs a mapping of keys to values"),
        ("", ": needs a mapping of keys to values"),
        ("a: [1", ":1: not YAML: expected ',' or ']'"),
        ("a: *b", ":1: not YAML: found undefined alias 'b'"),
        ("? [1]\n: 2", ":1: a key must be text"),
        ("a: !!python/name:os.system", ":1: the YAML tag 'tag:yaml.org,2002:python/"),
        ("a: !!int x", ":1: invalid literal for int"),
        ("a: 1\n---\nb: 2", ":2: not YAML: but found another document"),
        ("a: &a [*a]", ":1: too large or too deeply nested"),
        ("a: " + "[" * 60 + "]" * 60, ":1: too large or too deeply nested"),
        ("a: " + "[" * 9999, ": not YAML: "),
        ("a: \x00", ": not YAML: "),
    ],
)  # fmt: skip
def test_not_a_mapping_of_plain_values(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "a.yaml") + message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="too large or too deeply nested"):
        read(tmp_path, "\n".join(lines))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"a.yaml: not UTF-8 text"):
        load(tmp_path / "a.yaml")


def test_a_cell_reads_as_it_was_written(tmp_path: Path) -> None:
    body = "baseline: a\ncells: {a: {}, b: {attention: belief2, optimizer.lr: 1e-4}}"
    cell = expand(studies.study(tmp_path, body), tmp_path).jobs[1].cell
    cell.write(tmp_path / "config.yaml")
    again = Cell.read(tmp_path / "config.yaml")
    assert again == cell
    assert again.fingerprint == cell.fingerprint
    assert again.match_to is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.yaml: cannot be read: No such file or directory"),
        ("a: [", "config.yaml: not YAML: "),
        ("{}", "config.yaml: study: this key is required"),
        ("studi: x", "config.yaml: studi: unknown key 'studi'; did you mean 'study'?"),
    ],
)
def test_a_broken_cell(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml") as caught:
        Cell.read(tmp_path / "config.yaml")
    assert message in str(caught.value)


def test_families_are_kept_apart() -> None:
    assert set(Optimizer.family) >= {"adam", "adamw", "set-adam"}
    assert Optimizer.parse({"kind": "adamw", "lr": 1e-3}) == AdamW(lr=1e-3)
    assert not set(Optimizer.family) & set(Data.family)
