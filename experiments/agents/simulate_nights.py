"""Nights of an agent that tries fifty ideas without effect and one that is better by two sd.

The agent decides by the answer of `judge --stream` alone: it runs what `next` says, and keeps the
ideas whose verdict is "better". Beside it stands the greedy loop of most agents, which keeps
whatever is lower than the best value so far, in one run or in the mean of four.

    python experiments/agents/simulate_nights.py > experiments/agents/nights.csv

writes one row for each night and agent. docs/agents.md has the shares of nights.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from lit_attn import judge

NULL_IDEAS = 50
EFFECT = -2.0  # Difference of the loss of the real idea, in standard deviations of a run.
REAL = "real"
BASELINE = "baseline"

Pairs = Literal["seed", "none"]


class Night(NamedTuple):
    """Result of a night: kept ideas without effect, whether the real one is kept, and the cost."""

    night: int
    agent: str
    kept_false: int
    has_found: bool
    trainings: int


class Trainer:
    """Trainings of invented ideas, and the table in which they are logged."""

    def __init__(self, night: int, null_ideas: int) -> None:
        self.generator = np.random.default_rng(night)
        names = [f"idea-{number}" for number in range(null_ideas)]
        names.insert(int(self.generator.integers(null_ideas + 1)), REAL)
        self.ideas = names
        self.rows: list[dict[str, object]] = []

    def train(self, idea: str, seeds: list[int], mean: float) -> float:
        """Log a run for each seed, and return the mean of their losses."""
        losses = mean + self.generator.normal(size=len(seeds))
        for seed, loss in zip(seeds, losses, strict=True):
            self.rows.append({"variant": idea, "seed": seed, "loss": 100 + loss, "seconds": 300})
        return float(losses.mean())


def find_effect(idea: str) -> float:
    """Return the effect of an idea on the loss, in standard deviations of a run."""
    return EFFECT if idea == REAL else 0.0


def play_stream(trainer: Trainer, pairs: Pairs) -> set[str]:
    """Return the ideas that an agent keeps if it runs what `judge --stream` says."""
    trainer.train(BASELINE, [0, 1, 2, 3], 0.0)
    kept: set[str] = set()
    for idea in trainer.ideas:
        trainer.train(idea, [0, 1], find_effect(idea))
        while True:
            frame = pd.DataFrame(trainer.rows)
            answer = judge(frame, "loss:min", pairs=pairs, stream=True).model_dump()
            kept = {
                variant["variant"]
                for variant in answer["variants"]
                if variant["verdict"] == "better" and variant["is_final"]
            }
            if answer["next"]["kind"] == "none":
                break
            for name, count in answer["next"]["runs"].items():
                seeds = answer["next"]["seeds"].get(name, [-1] * count)
                trainer.train(name, seeds, find_effect(name))
    return kept


def play_greedy(trainer: Trainer, runs: int) -> set[str]:
    """Return the ideas that an agent keeps if it keeps whatever is lower than the best so far.

    A kept idea stays in the program, so that later ideas are changes of it.
    """
    seeds = list(range(runs))
    best = trainer.train(BASELINE, seeds, 0.0)
    mean = 0.0
    kept = set()
    for idea in trainer.ideas:
        loss = trainer.train(idea, seeds, mean + find_effect(idea))
        if loss < best:
            best = loss
            mean += find_effect(idea)
            kept.add(idea)
    return kept


AGENTS: dict[str, Callable[[Trainer], set[str]]] = {
    "stream, independent runs": lambda trainer: play_stream(trainer, "none"),
    "stream, pairs of seeds": lambda trainer: play_stream(trainer, "seed"),
    "greedy, one run": lambda trainer: play_greedy(trainer, 1),
    "greedy, mean of four runs": lambda trainer: play_greedy(trainer, 4),
}
"""Agents by the name that the page prints."""


def simulate(agent: str, nights: range, null_ideas: int = NULL_IDEAS) -> Iterator[Night]:
    """Yield the results of an agent's nights."""
    for night in nights:
        trainer = Trainer(night, null_ideas)
        kept = AGENTS[agent](trainer)
        false = len(kept - {REAL})
        yield Night(night, agent, false, REAL in kept, len(trainer.rows))


def main() -> None:
    """Write the results of all agents as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=200, help="nights of each agent")
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    options = parser.parse_args()
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(Night._fields)
    for agent in options.agents:
        for result in simulate(agent, range(options.nights)):
            table.writerow([*result[:3], int(result.has_found), result.trainings])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
