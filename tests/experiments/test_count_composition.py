"""The committed shares of extra costs equal new counts and a count by hand."""

import importlib

import pytest
from helpers.paths import EXPERIMENTS
from helpers.tables import read_table

from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "papers" / "count_composition.py"])
COUNTS = EXPERIMENTS / "papers" / "counts" / "composition.csv"
composition = importlib.import_module("count_composition")


def test_the_committed_file_has_new_counts_and_those_by_hand() -> None:
    """Pre- and post-composition by queries and keys: hidden weights, output weights and gates."""
    committed = {row["size"]: row for row in read_table(COUNTS)}
    assert list(committed) == list(composition.SIZES)
    parameters, flops = composition.count_shares(*composition.SIZES["6.9B-2048"])
    row = committed["6.9B-2048"]
    assert (row["parameters"], row["flops"]) == (f"{parameters:.6g}", f"{flops:.6g}")
    width, layers, heads, rank = 4096, 32, 32, 2
    hidden = 4 * rank * heads // 2
    side = width * hidden + hidden * 2 * rank * heads + width * heads
    plain = layers * (4 * width**2 + 3 * width * 11008 + 2 * width) + 2 * 50304 * width + width
    assert parameters == pytest.approx(layers * 4 * side / plain, rel=0.02)


def test_extra_computation_grows_with_the_length() -> None:
    flops = [float(row["flops"]) for row in read_table(COUNTS) if "6.9B" in row["size"]]
    assert flops == sorted(flops)
