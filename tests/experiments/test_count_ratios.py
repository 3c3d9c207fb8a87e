"""The committed ratios of costs equal new counts, and parameters equal a count by hand."""

import csv
import importlib
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "count_ratios.py"])
ratios = importlib.import_module("count_ratios")


def read_rows(folder: Path, name: str) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / f"{name}.csv").open() as lines:
        return {(row["length"], row["width"]): row for row in csv.DictReader(lines)}


def test_the_committed_files_have_new_counts(tmp_path: Path) -> None:
    assert ratios.main(["--widths", "256", "--lengths", "512", f"--out={tmp_path}"]) == 0
    for name in ratios.PAIRS:
        committed = read_rows(EXPERIMENTS / "papers" / "counts", name)
        assert len(committed) == len(ratios.WIDTHS) * len(ratios.LENGTHS)
        assert committed["512", "256"] == read_rows(tmp_path, name)["512", "256"]


def test_parameters_without_embeddings_equal_a_count_by_hand() -> None:
    """Four projections of 8 heads, or five of 4 heads with 2 weights each; 16 layers, no biases."""
    rows = read_rows(EXPERIMENTS / "papers" / "counts", "mgk-softmax")
    for width in ratios.WIDTHS:
        feed_forward = 2 * width * 2048 + 2048 + width
        norms = 4 * width
        softmax = 4 * width**2 + feed_forward + norms
        mgk = 5 * width**2 // 2 + 2 * 4 + feed_forward + norms
        actual = float(rows["256", str(width)]["without-embeddings"])
        assert actual == pytest.approx(mgk / softmax, rel=1e-5)


def test_a_wrong_width_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ratios.main(["--widths", "100", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err == "--widths: 100 is not a multiple of 8\n"
