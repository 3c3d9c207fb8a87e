"""Nights of simulated agents: the recorded ones, the page, and a smaller version of them."""

import importlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers.paths import EXPERIMENTS, ROOT
from helpers.tables import read_table

from lit_attn.schema.plugins import load_parts

AGENTS = EXPERIMENTS / "agents"
load_parts([AGENTS / "simulate_nights.py"])
nights = importlib.import_module("simulate_nights")

STREAMS = ("stream, independent runs", "stream, pairs of seeds")


def read_nights() -> dict[str, list[dict[str, str]]]:
    """Return the recorded nights by agent."""
    by_agent: dict[str, list[dict[str, str]]] = {}
    for row in read_table(AGENTS / "nights.csv"):
        by_agent.setdefault(row["agent"], []).append(row)
    return by_agent


def count_nights(results: Sequence[tuple[int, bool]]) -> tuple[int, int]:
    """Return the nights with a false idea kept, and those with the real one."""
    with_false = sum(kept_false > 0 for kept_false, _ in results)
    return with_false, sum(has_found for _, has_found in results)


def test_the_page_has_the_shares_of_200_recorded_nights() -> None:
    page = (ROOT / "docs/simulations.md").read_text("utf-8")
    section = page.partition("\n## A simulated night\n")[2].partition("\n## ")[0]
    recorded = read_nights()
    assert recorded.keys() == nights.AGENTS.keys()
    for agent, rows in recorded.items():
        assert [int(row["night"]) for row in rows] == list(range(200))
        false = [int(row["kept_false"]) for row in rows]
        with_false = sum(count > 0 for count in false) / 200
        with_real = sum(int(row["has_found"]) for row in rows) / 200
        trainings = sum(int(row["trainings"]) for row in rows) / 200
        (line,) = re.findall(rf"^\| {agent} \|(.*)\|$", section, re.MULTILINE)
        printed = [float(cell.strip().removesuffix(" %")) for cell in line.split("|")]
        expected = [100 * with_false, sum(false) / 200, 100 * with_real, trainings]
        for number, value in zip(printed, expected, strict=True):
            assert number == pytest.approx(value, abs=0.51 if value > 10 else 0.051)
        if agent in STREAMS:
            assert with_false <= 0.05
            assert with_real >= 0.6
        else:
            assert with_false > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("agent", STREAMS)
def test_a_recorded_night_is_simulated_again(agent: str) -> None:
    rows = read_nights()[agent][:4]
    for row, night in zip(rows, nights.simulate(agent, range(4)), strict=True):
        again = [str(value) for value in (*night[:3], int(night.has_found), night.trainings)]
        assert again == list(row.values())


@pytest.mark.slow
def test_a_smaller_night_keeps_the_real_idea_and_no_false_one() -> None:
    """Thirty other nights with ten null ideas; the greedy loop breaks the first bound."""
    counts = {}
    for agent in (*STREAMS, "greedy, one run"):
        results = [night[2:4] for night in nights.simulate(agent, range(1000, 1030), 10)]
        counts[agent] = count_nights(results)
    for agent in STREAMS:
        with_false, with_real = counts[agent]
        assert with_false <= 3, agent
        assert with_real >= 18, agent
    with_false, _ = counts["greedy, one run"]
    assert with_false >= 15


def test_an_agent_with_null_ideas_only_is_told_to_keep_none() -> None:
    (night,) = nights.simulate(STREAMS[0], range(7, 8), 5)
    trainer = nights.Trainer(7, 5)
    trainer.ideas.remove(nights.REAL)
    assert nights.play_stream(trainer, "none") == set()
    assert night.trainings >= 4 + 2 * 6


def test_the_loop_of_the_page_keeps_the_real_idea() -> None:
    page = (ROOT / "docs/agents.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(import pandas.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    generator = np.random.default_rng(2)

    def train(name: str) -> float:
        return float(generator.normal() - 4 * (name == "real"))

    assert names["try_ideas"](["null", "real", "other"], train) == ["real"]
