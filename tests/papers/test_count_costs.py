"""The committed counts of models equal new ones, and pages of papers show them."""

import csv
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS

from lit_attn.papers.figures import draw_figure
from lit_attn.papers.page import make_tables
from lit_attn.papers.published import make_entries
from lit_attn.papers.runs import expand_paper
from lit_attn.papers.source import COUNTS_FILE, read_paper
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import load_parts

PAPERS = EXPERIMENTS / "papers"
load_parts([PAPERS / "count_costs.py"])
costs = importlib.import_module("count_costs")


def read_rows(path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    with path.open() as lines:
        return {
            (row["study"], row["variant"]): (row["parameters"], row["flops"])
            for row in csv.DictReader(lines)
        }


def test_every_variant_whose_counts_a_paper_prints_has_a_row() -> None:
    expected = set()
    for study, variants in costs.find_counted_variants().items():
        expected |= {(study, variant) for variant in variants}
    assert read_rows(PAPERS / COUNTS_FILE).keys() == expected
    assert ("mgk-retrieval", "softmax-8") in expected
    assert ("dcmha-overhead-1.4B", "standard") in expected
    assert ("dcmha-imagenet", "vit-m") in expected


@pytest.mark.slow
def test_the_committed_file_has_new_counts(tmp_path: Path) -> None:
    studies = ["belief2-cifar100", "beliefformer-imagenet-time"]
    assert costs.main([f"--out={tmp_path}", "--studies", *studies]) == 0
    committed = read_rows(PAPERS / COUNTS_FILE)
    counted = read_rows(tmp_path / COUNTS_FILE.name)
    assert {study for study, _ in counted} == set(studies)
    assert counted == {key: committed[key] for key in committed if key[0] in studies}


@pytest.mark.parametrize(
    ("paper", "table", "column", "texts"),
    [
        ("dcmha", "3", "params", ["411 (counted)", "834 (counted)", "1439 (counted)"]),
        ("dcmha", "7", "params", ["22M (counted)", "39M (counted)"]),
        ("dcmha", "8", "Relative size", ["1.00 (counted)", "1.03 (counted)", "1.76 (counted)"]),
    ],
)
def test_a_table_without_results_shows_counts(
    paper: str, table: str, column: str, texts: list[str]
) -> None:
    source = read_paper(paper, "", PAPERS)
    item = source.paper.tables[table]
    grid = make_entries(source, item, {})
    assert [entry.ours for line in grid for entry in line if entry.column == column] == texts
    printed = make_tables(source, item, {}, "Table.")[0]
    assert any("no cell of this variant has a result" in note for note in printed.notes)


@pytest.mark.parametrize("number", ["4", "8", "15", "16"])
def test_a_figure_of_counts_needs_no_results(number: str) -> None:
    source = read_paper("mgk", "", PAPERS)
    item = source.paper.figures[number]
    images = draw_figure(source, item, {}, "*")
    assert images["panels"]["png"].startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"nothing to run: .*count_costs\.py` measures it"):
        expand_paper(source, [f"figure-{number}"], Path("runs"))


def test_small_models_and_readings_show_no_counts() -> None:
    source = read_paper("belief2", "", PAPERS)
    item = source.paper.tables["2"]
    for line in make_entries(source, item, {}, "*-repository-width"):
        assert not any(entry.ours for entry in line)
    for line in make_entries(replace(source, size="embedded"), item, {}):
        assert not any(entry.ours for entry in line)


def test_a_missing_file_of_counts_leaves_the_cells_empty(tmp_path: Path) -> None:
    source = read_paper("dcmha", "", PAPERS)
    elsewhere = replace(source, path=tmp_path / "dcmha.yaml")
    for line in make_entries(elsewhere, source.paper.tables["7"], {}):
        assert not any(entry.ours for entry in line)
