"""Published numbers: one place for each, which is the paper's file if a paper has the number."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers import studies
from helpers.invented_papers import FOLDER, NAMES
from helpers.shipped import shipped_matrix, shipped_studies

from lit_attn.ablate.axes import combine_axes
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.config.study_values import Published
from lit_attn.papers.source import read_paper
from lit_attn.papers.study_numbers import PublishedCell, list_cells, parse_cell
from lit_attn.schema.errors import ConfigError


@cache
def cells_of(paper: str) -> tuple[PublishedCell, ...]:
    return tuple(list_cells(read_paper(paper, folder=FOLDER).paper))


def contradictions(paper: str) -> Iterator[set[PublishedCell]]:
    """Yield the cells of rows that publish different numbers of the same value of a variant."""
    groups: defaultdict[tuple[object, ...], set[PublishedCell]] = defaultdict(set)
    for cell in cells_of(paper):
        if not cell.is_reading:
            groups[cell.study, cell.variant, cell.value, cell.epoch].add(cell)
    for group in groups.values():
        if len({cell.published for cell in group}) > 1:
            yield group


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("72.01±0.20", (72.01, 0.2)),
        ("88.15 + 0.55", (88.15, 0.55)),
        ("64.00 ± 0.37", (64.0, 0.37)),
        ("34.42", (34.42, None)),
        ("37.93 (1.3%)", (37.93, None)),
        ("128.86M", (128.86, None)),
        ("\N{MINUS SIGN}0.5", (-0.5, None)),
        ("1e-3", (0.001, None)),
        ("-", None),
        ("<", None),
        ("^", None),
        ("", None),
        ("IWSLT 14", None),
    ],
)
def test_a_cell_has_a_mean_and_a_deviation(text: str, published: Published | None) -> None:
    assert parse_cell(text) == published


@pytest.mark.parametrize("paper", NAMES)
def test_every_published_cell_has_its_variant(paper: str) -> None:
    variants = {}
    rows = [cell for cell in cells_of(paper) if not cell.is_reading]
    assert rows
    for study in {cell.study for cell in rows}:
        assert study in shipped_studies(), study
        variants[study] = {variant.name for variant in combine_axes(shipped_studies()[study])}
    for cell in rows:
        assert cell.variant in variants[cell.study], cell


@pytest.mark.parametrize("paper", NAMES)
def test_a_study_has_no_number_that_its_paper_publishes(paper: str) -> None:
    for cell in cells_of(paper):
        if cell.study not in shipped_studies():
            continue
        for variant, number in shipped_studies()[cell.study].study.published.items():
            assert number[0] != cell.published[0], (variant, cell)


@pytest.mark.parametrize("paper", NAMES)
def test_cells_that_contradict_each_other_are_explained(paper: str) -> None:
    for group in contradictions(paper):
        believed = {cell.published for cell in group if not cell.is_slip}
        assert len(believed) == 1, group


def test_the_variance_decides_which_number_belongs_to_mgk() -> None:
    """MGK, section 3.4: 34.34, the number of Table 4, belongs to 3 √D, and 34.36 to √D."""
    (group,) = contradictions("mgk")
    assert {cell.place for cell in group if cell.is_slip} == {
        "tables.4: 'Transformer MGK 2 head | BLEU score'"
    }
    published = shipped_matrix("mgk-iwslt14").published
    assert published["mgk-2"] == (34.36, None)
    assert published["variance-3"] == published["wide-mgk-2"] == (34.34, None)


def test_the_width_decides_which_number_belongs_to_the_vit_of_the_repository() -> None:
    """Belief2, Table 2: 72.01 belongs to 3.38M parameters, which the wider FFN has."""
    published = shipped_matrix("belief2-cifar100").published
    assert published["standard"] == (72.01, 0.2)
    assert published["standard-repository-width"] == (73.81, None)


@pytest.mark.parametrize(
    ("study", "numbers"),
    [
        ("attentionx-cifar100", {"standard": (61.86, 0.47), "attentionx": (64.0, 0.37)}),
        (
            "beliefformer-imagenet-time",
            {"standard": (37.46, None), "belief": (37.93, None), "belief-star": (38.87, None)},
        ),
        (
            "dcmha-imagenet",
            {
                "standard": (79.8, None),
                "dcmha-jax": (80.1, None),
                "paper-dcmha": (80.1, None),
                "vit-m": (80.3, None),
            },
        ),
        ("belief2-ade20k", {"overlapping-standard": (38.1, None)}),
        ("attentionx-cifar100-short", {}),
        ("digits", {}),
    ],
)
def test_a_study_shows_the_numbers_of_its_paper(study: str, numbers: dict[str, Published]) -> None:
    matrix = shipped_matrix(study)
    assert matrix.published == numbers
    shown = {variant.name: variant.published for variant in matrix.plan().variants}
    assert {name: number for name, number in shown.items() if number is not None} == numbers


PAPER = """
title: A paper
link: https://example.org
studies: ablations.yaml
small: {}
tables:
  "1":
    caption: A table
    columns: {accuracy: {study: tiny}, time: {study: tiny, value: step_time}}
    rows:
      Standard: {variant: a, published: 72.01±0.20 | 0.5}
      Ours: {variant: b, published: 73.00 | 0.7}
    readings: [wide-*]
"""
BODY = """
cells: {a: {attention: standard}, b: {attention: belief}, wide-b: {attention: belief2}}
baseline: a
match: none
"""


def expand_study(folder: Path, keys: str, paper: str = PAPER) -> Matrix:
    (folder / "paper.yaml").write_text(paper, encoding="utf-8")
    return expand(studies.study(folder, BODY + keys), folder / "runs")


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ("", {}),
        ("published: {b: 1.5}", {"b": (1.5, None)}),
        ("paper: {file: paper.yaml}", {"a": (72.01, 0.2), "b": (73.0, None)}),
        ("paper: {file: paper.yaml, value: step_time}", {"a": (0.5, None), "b": (0.7, None)}),
        (
            "paper: {file: paper.yaml, readings: [wide-b]}",
            {"a": (72.01, 0.2), "b": (73.0, None), "wide-b": (73.0, None)},
        ),
        (
            "paper: {file: paper.yaml}\npublished: {wide-b: [1.5, 0.5]}",
            {"a": (72.01, 0.2), "b": (73.0, None), "wide-b": (1.5, 0.5)},
        ),
    ],
)
def test_numbers_come_from_the_paper_and_from_the_study(
    keys: str, numbers: dict[str, Published], tmp_path: Path
) -> None:
    assert expand_study(tmp_path, keys).published == numbers


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "paper: {file: papers.yaml}",
            r"ablations\.yaml:\d+: tiny\.paper\.file: no file \S+papers\.yaml; did you mean"
            r" 'paper\.yaml'\?",
        ),
        (
            "paper: {file: paper.yaml, value: flops}",
            r"ablations\.yaml:\d+: tiny\.paper\.file: paper\.yaml has no column of the study"
            r" 'tiny' with the value 'flops'",
        ),
        (
            "paper: {file: paper.yaml, readings: [wider-*]}",
            r"ablations\.yaml:\d+: tiny\.paper\.readings\.0: paper\.yaml has no reading"
            r" 'wider-\*'; did you mean 'wide-b'\?",
        ),
        (
            "paper: {file: paper.yaml}\npublished: {b: 73}",
            r"ablations\.yaml:\d+: tiny\.published\.b: this number is in paper\.yaml, too"
            r" \(tables\.1: 'Ours \| accuracy'\)",
        ),
        (
            "paper: {file: paper.yaml, reading: [b]}",
            r"ablations\.yaml:\d+: studies\.tiny\.paper\.reading: .*readings",
        ),
    ],
)
def test_a_wrong_reference_is_one_line(keys: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        expand_study(tmp_path, keys)


def test_two_numbers_of_a_variant_need_an_explanation(tmp_path: Path) -> None:
    second = """
  "2":
    caption: Another table
    columns: {accuracy: {study: tiny}}
    rows: {Again: {variant: b, published: "73.5"}}
"""
    with pytest.raises(
        ConfigError, match=r"paper\.yaml: tiny/b: tables\.1: 'Ours \| accuracy'.*73"
    ):
        expand_study(tmp_path, "paper: {file: paper.yaml}", PAPER + second)
    explained = PAPER + second + "    slips: {Again | accuracy: A misprint.}\n"
    numbers = expand_study(tmp_path, "paper: {file: paper.yaml}", explained).published
    assert numbers["b"] == (73.0, None)
