"""YAML and JSON of somebody else: limits, and the values within them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.config.cell import Cell
from lit_attn.config.source import load
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.limits import parse_json
from lit_attn.schema.yaml_text import format_yaml, parse_plain

# YAML cannot contain these line breaks of Unicode in every place.
CHARACTERS = st.characters(exclude_characters="\x85\u2028\u2029", exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXTS
VALUES = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner),
    max_leaves=12,
)

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
HOSTILE = {
    "bomb": BOMB,
    "cycle": "a: &a {b: *a}\n",
    "cycle of a list": "a: &a [1, [*a]]\n",
    "merged cycle": "a: &a {<<: *a}\n",
    "nested maps": "a: " + "{b: " * 3000 + "1" + "}" * 3000 + "\n",
    "nested lists": "a: " + "[" * 3000 + "]" * 3000 + "\n",
    "nested block": "\n".join(" " * depth + "a:" for depth in range(3000)),
    "401 digits": f"a: {'9' * 401}\n",
    "5,000 digits": f"a: {'9' * 5000}\n",
    "20 digits": f"a: {'9' * 20}\n",
    "python object": "a: !!python/object/apply:os.system [x]\n",
    "python name": "a: !!python/name:os.system x\n",
    "own tag": "a: !mine 1\n",
    "set": "a: !!set {b}\n",
    "key twice": "a: 1\na: 2\n",
    "key that is a list": "? [a]\n: 1\n",
    "no anchor": "a: *b\n",
    "wrong merge": "<<: 1\n",
    "wrong integer": "a: !!int x\n",
    "wrong truth value": "a: !!bool x\n",
}


@pytest.mark.slow
@given(VALUES)
@settings(max_examples=60, deadline=None)
def test_yaml_that_was_written_is_read_back(value: Any) -> None:
    assert parse_plain(format_yaml(value), "file") == value


@given(VALUES)
@settings(max_examples=30, deadline=None)
def test_json_within_the_limits_is_read_as_json(value: Any) -> None:
    text = json.dumps(value, default=str)
    assert parse_json(text, "file") == json.loads(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\n", {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}),
        (
            "a: &x {b: 1}\nc: &y {b: 2, d: 3}\ne: {<<: [*x, *y]}\n",
            {"a": {"b": 1}, "c": {"b": 2, "d": 3}, "e": {"b": 1, "d": 3}},
        ),
        ("a: &x [1, 2]\nb: [*x, *x]\n", {"a": [1, 2], "b": [[1, 2], [1, 2]]}),
        ("a: &x 1\nb: *x\n", {"a": 1, "b": 1}),
        ("a: &x 1\nb: &x 2\nc: *x\n", {"a": 1, "b": 2, "c": 2}),
        ("'<<': 1\nb: =\nc: 2026-11-28\n", {"<<": 1, "b": "=", "c": "2026-11-28"}),
        ("", None),
    ],
)
def test_aliases_merges_and_dates(text: str, value: Any) -> None:
    assert parse_plain(text, "file") == value


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_one_line_for_every_reader(text: str, tmp_path: Path) -> None:
    for name, read in (("config.yaml", Cell.read), ("study.yaml", load)):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read(path)
        message = str(caught.value)
        assert message.startswith(str(path))
        assert len(message.splitlines()) == 1
        assert len(message) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "file: the key 'a' is written twice"),
        ("[" * 3000 + "]" * 3000, "file: too large or too deeply nested"),
        ("[" * 60 + "]" * 60, "file: too large or too deeply nested"),
        ("[" + "1, " * 200_000 + "1]", "file: too large or too deeply nested"),
        ("9" * 401, "file: an integer of 401 characters is too large"),
        ("9" * 5000, "file: an integer of 5000 characters is too large"),
        ("9" * 20, "is too large for an integer of 64 bits"),
        ("{", "file: not JSON"),
    ],
    ids=["twice", "deep", "60 levels", "large", "401", "5000", "20", "torn"],
)
def test_hostile_json_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(text, "file")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
