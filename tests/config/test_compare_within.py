"""`compare_within`: each size of a study has its own baseline and its own matching."""

from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate.plan import expand
from lit_attn.ablate.variants import resolve
from lit_attn.config.study import choose, read_studies
from lit_attn.schema.errors import ConfigError

LADDER = """
baseline: standard
compare_within: [size]
axes:
  size: {small: {}, large: {model: {dim: 32, heads: 4}}}
  layer: {standard: {}, belief2: {attention: belief2}, thin: {attention: belief2, model.depth: 2}}
exclude: [{layer: thin}]
"""


def test_every_level_is_a_study_with_its_own_baseline(tmp_path: Path) -> None:
    sources = read_studies(studies.write(tmp_path, LADDER))
    assert list(sources) == ["tiny-small", "tiny-large"]
    for (name, source), dim in zip(sources.items(), (16, 32), strict=True):
        assert (source.family, f"{source.family}-{source.level}") == ("tiny", name)
        assert source.study.title == f"A tiny study, {source.level}"
        standard, belief2 = resolve(source)
        assert (standard.name, belief2.name) == ("standard", "belief2")
        assert standard.experiment.model.dim == belief2.experiment.model.dim == dim
        # `match: parameters` solves for the FFN of the baseline of the same size.
        assert belief2.match_to == standard.experiment.model
        plan = expand(source, tmp_path / "runs").plan()
        assert (plan.family, plan.level) == ("tiny", source.level)


def test_levels_of_two_axes_are_combined(tmp_path: Path) -> None:
    body = LADDER.replace("[size]", "[size, length]").replace(
        "axes:", "axes:\n  length: {short: {}, long: {training.epochs: 4}}"
    )
    sources = read_studies(studies.write(tmp_path, body))
    assert list(sources) == [
        f"tiny-{size}-{length}" for size in ("small", "large") for length in ("short", "long")
    ]
    long = resolve(sources["tiny-large-long"])[0]
    assert (long.experiment.training.epochs, long.experiment.model.dim) == (4, 32)


def test_the_name_of_the_study_chooses_all_levels(tmp_path: Path) -> None:
    path = studies.write(tmp_path, LADDER)
    sources = read_studies(path)
    assert choose(sources, ["tiny"], path) == list(sources.values())
    assert [source.name for source in choose(sources, ["tiny-large"], path)] == ["tiny-large"]
    with pytest.raises(ConfigError, match="no study 'tinny'; did you mean 'tiny'"):
        choose(sources, ["tinny"], path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[size]",
            "[sizes]",
            ":8: tiny.compare_within: 'sizes' is no axis of named overrides; did",
        ),
        ("size: {small: {}, large: {model: {dim: 32, heads: 4}}}", "size: [1, 2]", ":8: tiny."),
        ("{layer: thin}", "{size: large}", ":12: tiny.exclude.0.size: is an axis of"),
        ("exclude:", "cells: {x: {}}\nexclude:", ":12: tiny.cells: not possible with"),
    ],
)
def test_mistakes_are_one_error_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LADDER
    with pytest.raises(ConfigError) as caught:
        read_studies(studies.write(tmp_path, LADDER.replace(old, new)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
