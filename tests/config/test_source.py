"""YAML with the line of every key."""

from pathlib import Path

import pytest

from lit_attn.config.source import load, locate, parse_value
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import Mapping, Sequence, Where


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1.5E+3", 1500.0), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("010", 10),
        ("no", "no"), ("on", "on"), ("y", "y"), ("true", True), ("False", False), ("", None),
        ("~", None), ("null", None), ("12:30:00", "12:30:00"), ("2020-01-01", "2020-01-01"),
        ("0x10", 16), ("0o10", 8), ("1_000", 1000), ("'3'", "3"), ("[1, a]", [1, "a"]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text, "command line")
    assert parsed == value
    assert type(parsed) is type(value) or isinstance(parsed, Mapping | Sequence)


def load_text(folder: Path, text: str) -> Mapping:
    path = folder / "a.yaml"
    path.write_text(text)
    return load(path)


def test_every_key_has_its_line(tmp_path: Path) -> None:
    tree = load_text(tmp_path, "a:\n  b:\n    - 1\n    - c: 2\nd: {e: 3}\n")
    file = str(tmp_path / "a.yaml")
    for keys, line in [
        (("a",), 1), (("a", "b"), 2), (("a", "b", 0), 3), (("a", "b", 1, "c"), 4),
        (("d", "e"), 5), (("a", "b", 7), 2), (("a", "nothing"), 1), ((), 1),
    ]:  # fmt: skip
        assert locate(tree, keys) == Where(file, line)
    assert locate({"a": 1}, ["a"]) is None


def test_keys_of_merged_mappings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":1: a key must be text"):
        load_text(tmp_path, "a: {<<: {[1]: 2}}\n")
    with pytest.raises(ConfigError, match=r":1: 'x' is written twice"):
        load_text(tmp_path, "a: {<<: {x: 1, x: 2}}\n")


def test_merged_keys_keep_their_lines(tmp_path: Path) -> None:
    tree = load_text(
        tmp_path,
        "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: &c\n  x: 0\n  <<: [*a, *b]\n  z: 5\n"
        "d: {<<: *c, w: 1}\ne: *c\n",
    )
    assert tree["c"] == {"x": 0, "y": 2, "z": 5}
    assert list(tree["c"]) == ["y", "z", "x"]
    assert tree["d"] == tree["c"] | {"w": 1}
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
        ("a: [1e400]", ":1: 1e400 is not a finite number"),
        ("a: .inf", ":1: .inf is not a finite number"),
        ("a: -.INF", ":1: -.INF is not a finite number"),
        ("a: .nan", ":1: .nan is not a finite number"),
        ("a: !!int x", ":1: 'x' is no value of the type int"),
        ("a: 1\n---\nb: 2", ":2: not YAML: a second document; remove the line `---`"),
        ("a: &a [*a]", ":1: the alias '*a' stands in the value that it names"),
        ("a: " + "[" * 60 + "]" * 60, ": too large or too deeply nested"),
        ("a: " + "[" * 9999, ": too large or too deeply nested"),
        ("a: \x00", ": not YAML: "),
        ("a: 1\n\tb: 2", ":2: not YAML: a tab stands before the text; write spaces"),
        ("a: 1\nb: 'two\nc: 3\n", ":2: not YAML: the quote that begins in this line has no"),
        ('a: 1\nb: "two\nc: 3\n', ":2: not YAML: the quote that begins in this line has no"),
    ],
)  # fmt: skip
def test_a_mistake_in_yaml_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert str(tmp_path / "a.yaml") + message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_in_latin_1_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("a: 1\r\nb: fünf\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a.yaml:2: not UTF-8 text .*; save the file as UTF-8"):
        load(path)
