"""Reports of another program's table: pairs of seeds and independent runs."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lit_attn import judge
from lit_attn.report.__main__ import main

pytestmark = pytest.mark.usefixtures("no_rendering")

BASE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02]
SKEWED = [2.9, 2.95, 2.9, 2.92, 2.93, 5.0]
FILES = ("table.md", "table.full.md", "table.txt", "table.html")


def write_report(root: Path, groups: dict[str, list[float]], pairs: str) -> Path:
    """Write the report of a table and return its folder."""
    root.mkdir(exist_ok=True)
    path = root / "runs.csv"
    rows = ["variant,seed,val_loss"]
    for variant, values in groups.items():
        rows += [f"{variant},{seed},{value}" for seed, value in enumerate(values)]
    path.write_text("\n".join(rows) + "\n")
    words = ["--csv", str(path), "--pairs", pairs, "--baseline", "base"]
    assert main([*words, "--metric", "val_loss:min", "--reports", str(root / "out")]) == 0
    return root / "out" / "runs"


def read_words(path: Path) -> str:
    """Return the text of a file with one blank for each run of blanks and line ends."""
    return " ".join(path.read_text("utf-8").split())


@pytest.mark.parametrize(("losses", "is_warned"), [(SKEWED, True), (BASE[::-1], False)])
def test_a_table_warns_of_spreads_as_judge_does(
    losses: list[float], is_warned: bool, tmp_path: Path
) -> None:
    folder = write_report(tmp_path, {"base": BASE, "other": losses}, "seed")
    for name in FILES:
        text = read_words(folder / name)
        assert ("other: its standard deviation is " in text) == is_warned, name


def test_doubtful_variants_share_one_warning(tmp_path: Path) -> None:
    """A study with many variants that never learn had a warning for each of them."""
    groups = {"base": BASE, "other": SKEWED, "new": SKEWED, "good": BASE[::-1]}
    text = read_words(write_report(tmp_path, groups, "seed") / "table.full.md")
    assert text.count("Warning: the standard deviation") == 1
    assert "the standard deviations of 2 variants differ from the baseline's" in text
    assert "(other 0.849; new 0.849; largest skewness" in text


GROUPS = {
    "base": [3.01, 3.03, 2.98, 3.02, 2.99, 3.0],
    "good": [2.91, 2.93, 2.9, 2.92, 2.89],
    "same": [3.0, 3.02, 2.99, 3.01],
    "once": [2.95],
}


def test_independent_runs_have_a_report_with_the_numbers_of_judge(tmp_path: Path) -> None:
    folder = write_report(tmp_path, GROUPS, "none")
    table = pd.read_csv(folder / "table.csv").set_index("variant")
    answer = judge(tmp_path / "runs.csv", "val_loss:min", pairs="none", baseline="base")
    verdicts = {}
    for variant in answer.variants:
        row = table.loc[variant.variant]
        verdicts[variant.variant] = variant.verdict
        if variant.difference is None:
            assert np.isnan(row["difference"])
            continue
        assert row["difference"] == pytest.approx(variant.difference.mean)
        assert row["low"] == pytest.approx(variant.difference.low)
        assert row["p_adjusted"] == pytest.approx(variant.p)
        assert row["significant"] == variant.is_significant
    assert verdicts == {"good": "better", "same": "undecided", "once": "undecided"}
    assert table.loc["good", "best"]


def test_captions_of_independent_runs_speak_of_no_pairs(tmp_path: Path) -> None:
    folder = write_report(tmp_path, GROUPS, "none")
    words = ("Welch's 95 % interval of independent runs", "permutation test")
    for name in FILES[:2]:
        text = read_words(folder / name)
        for word in words:
            assert word in text, name
        assert "pair" not in text, name
        assert "sign-flip" not in text, name
        assert ", which needs at least 4 runs of each" in text, name
    page = read_words(folder / "table.html")
    captions = " ".join(re.findall(r"<figcaption>(.*?)</figcaption>", page))
    assert "paired t interval" not in page
    assert "the value of every run" in page
    assert captions.count("pair") == 0


def test_a_failed_independent_run_counts_in_the_table(tmp_path: Path) -> None:
    groups = {**GROUPS, "good": [2.91, 2.93, 2.9, float("nan"), 2.89]}
    folder = write_report(tmp_path, groups, "none")
    text = read_words(folder / "table.full.md")
    assert "4/5, 1 error" in text
    assert "a failed run is worse than any value" in text
    assert "failed seed is worse" not in text


def test_the_order_of_independent_runs_does_not_change_a_table(tmp_path: Path) -> None:
    first = write_report(tmp_path / "a", GROUPS, "none")
    turned = {name: values[::-1] for name, values in GROUPS.items()}
    second = write_report(tmp_path / "b", turned, "none")
    # The last digit of a mean in table.csv depends on the order of the sum.
    for name in ("table.full.md", "table.txt"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
