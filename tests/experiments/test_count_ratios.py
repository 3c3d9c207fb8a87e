"""The committed ratios of costs equal new counts, and parameters equal a count by hand."""

import importlib
from pathlib import Path

import pytest
from helpers.paths import EXPERIMENTS
from helpers.tables import read_table

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "papers" / "count_ratios.py"])
ratios = importlib.import_module("count_ratios")


def read_rows(folder: Path, name: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["length"], row["width"]): row for row in read_table(folder / f"{name}.csv")}


@pytest.mark.slow
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


def test_attention_by_the_formulas_of_appendix_b_is_cheaper_with_width_and_length() -> None:
    """Attention alone has 5/8 of the operations without weights, and 3/4 with many tokens."""
    rows = read_rows(EXPERIMENTS / "papers" / "counts", "mgk-softmax")
    ratios_by_size = {(int(n), int(d)): float(row["formula"]) for (n, d), row in rows.items()}
    for (length, width), ratio in ratios_by_size.items():
        assert 5 / 8 < ratio < 1
        assert ratio > ratios_by_size.get((2 * length, width), 0)
        assert ratio > ratios_by_size.get((length, 2 * width), 0)
    for length, expected in ((1, 5 / 8), (10**9, 3 / 4)):
        attention = 8 * length * 1024**2 + 4 * length**2 * 1024
        ratio = ratios.divide_by_formula(1, attention, 1024, length)
        assert ratio == pytest.approx(expected, rel=2e-3)


def test_linear_attention_has_equal_ratios_at_all_lengths() -> None:
    rows = read_rows(EXPERIMENTS / "papers" / "counts", "mlk-linear")
    for (_, width), row in rows.items():
        assert row["training"] == rows["256", width]["training"]
        assert float(row["training"]) < 1


def test_a_wrong_width_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ratios.main(["--widths", "100", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().err == "--widths: 100 is not a multiple of 8\n"
