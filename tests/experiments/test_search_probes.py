"""The probes of search: where their answers stand, and sequences without room for them."""

import importlib
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT

from lit_attn.schema.plugins import load_parts

load_parts([ROOT / "experiments" / "probes" / "search.py"])
search = importlib.import_module("search")


def draw(config: Any, count: int) -> Any:
    return config.draw(np.random.default_rng(0), count, config.length, False)


def test_the_answer_of_an_induction_stands_behind_the_first_mark() -> None:
    config = search.InductionConfig(length=16, gap=3)
    tokens, targets = draw(config, 200)
    first_marks = (tokens == config.ids - 1).argmax(axis=1)
    np.testing.assert_array_equal((tokens == config.ids - 1).sum(axis=1), 2)
    rows = np.arange(len(tokens))
    np.testing.assert_array_equal(targets[:, -1], tokens[rows, first_marks + 4])
    assert (tokens[:, -4] == config.ids - 1).all()


def test_the_key_of_a_needle_stands_once_before_the_question() -> None:
    config = search.NeedleConfig(length=16)
    tokens, targets = draw(config, 200)
    for row, wanted in zip(tokens, targets[:, -1], strict=True):
        (place,) = np.flatnonzero(row[:-1] == row[-1])
        assert row[place + 1] == wanted
    # Every place occurs.
    places = (tokens[:, :-1] == tokens[:, -1:]).argmax(axis=1)
    assert set(places.tolist()) == set(range(14))


def test_the_last_value_of_an_overwritten_needle_counts() -> None:
    config = search.OverwrittenNeedleConfig(length=24, writes=3)
    tokens, targets = draw(config, 200)
    last_places = set()
    for row, wanted in zip(tokens, targets[:, -1], strict=True):
        places = np.flatnonzero(row[:-1] == row[-1])
        values = row[places + 1]
        assert len(set(values.tolist())) == 3
        assert ((values >= 8) & (values < 16)).all()
        assert values[-1] == wanted
        last_places.add(int(places[-1]))
    # Every place of two tokens before the question that two others can precede occurs.
    assert last_places == set(range(4, 22, 2))


def test_an_overwritten_needle_needs_room_for_its_writes() -> None:
    with pytest.raises(ValueError, match="16 tokens have room for 7 at most"):
        search.OverwrittenNeedleConfig(length=16, writes=8)
    with pytest.raises(ValueError, match="3 values are written at most once each"):
        search.OverwrittenNeedleConfig(length=16, values=3)
