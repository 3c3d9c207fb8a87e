"""Directions of metrics: written or known, never guessed."""

from importlib import import_module
from typing import Any

import pytest

from lit_attn.config import experiment  # noqa: F401  (registers every task)
from lit_attn.judging.directions import KNOWN, find_goal, parse_metric, simplify
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.tasks.metrics import GOAL_CORRECTIONS, PACKAGES
from lit_attn.tasks.task import Task

COSTS = [
    "ms",
    "step_ms",
    "val_ce",
    "cross-ent",
    "kl",
    "distance",
    "wasserstein",
    "regret",
    "rank",
    "gap",
    "gpu_hours",
    "bytes",
    "peak_mem",
    "steps_to_target",
    "miss_rate",
    "hamming",
    "violations",
    "nats",
    "neg_log_lik",
    "lossless_ratio",
    "blossom_accuracy",
    "maestro_score",
    "time_saved",
    "loss_reduction",
    "mse_skill",
]
"""Names whose direction an earlier version guessed, often wrongly."""


class Anything:
    """Signature whose fields are all empty."""

    def __getattr__(self, name: str) -> Any:
        return ()


def list_own_goals() -> dict[str, str]:
    """Return the directions of the metrics of every task of this project."""
    goals = {}
    for name, member in Task.family.items():
        # Other tests of this process may have registered the tasks of plug-ins.
        is_own = member.__module__.startswith("lit_attn.")
        if name == "module" or not is_own:
            continue
        for info in member().metrics(Anything()):
            if info.goal is not None and "*" not in info.name:
                goals[info.name] = info.goal
    return goals


def list_torchmetrics() -> dict[str, str]:
    """Return the directions of the classes of torchmetrics that say one.

    Accuracy and its like have none of their own, because they build the class of a task.
    """
    directions: dict[str, bool | None] = {}
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            directions[name] = getattr(getattr(module, name), "higher_is_better", None)
    goals = {}
    for name, is_higher in directions.items():
        value = is_higher
        if value is None:
            value = directions.get(f"Multiclass{name}", directions.get(f"Binary{name}"))
        if isinstance(value, bool):
            goals[name] = GOAL_CORRECTIONS.get(name, "max" if value else "min")
    return goals


def test_the_table_is_that_of_this_project_and_of_torchmetrics() -> None:
    expected: dict[str, list[str]] = {"max": [], "min": []}
    own_goals = list_own_goals()
    for name, goal in (list_torchmetrics() | own_goals).items():
        expected[goal].append(name)
    listed = parse_plain(KNOWN.read_text(), "text")
    for goal, names in expected.items():
        assert listed[goal] == sorted(names), format_yaml({goal: sorted(names)})


def test_no_two_names_of_the_table_contradict_each_other() -> None:
    listed = parse_plain(KNOWN.read_text(), "text")
    larger = {simplify(name) for name in listed["max"]}
    smaller = {simplify(name) for name in listed["min"]}
    assert not larger & smaller


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("test/calibration", "min"),
        ("test/averaged-calibration", "min"),
        ("val_loss", "min"),
        ("val/bits_per_byte", "min"),
        ("test/accuracy", "max"),
        ("val_f1_score", "max"),
        ("kl_divergence", "min"),
        ("test/MulticlassHammingDistance", "min"),
        ("WordInfoPreserved", "max"),
    ],
)
def test_a_known_name_has_its_direction(name: str, goal: str) -> None:
    assert find_goal(name, "here") == goal


@pytest.mark.parametrize("name", COSTS)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"here: .* --metric {name}:min or --metric {name}:max"):
        find_goal(name, "here")


def test_a_written_direction_stands_behind_the_name() -> None:
    assert parse_metric("val:loss:min") == ("val:loss", "min")
    assert parse_metric("ms:max") == ("ms", "max")
    assert parse_metric("IoU:cat") == ("IoU:cat", None)
