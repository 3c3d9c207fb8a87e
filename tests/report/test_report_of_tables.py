"""Reports of another program's table: pairs of seeds and independent runs."""

from pathlib import Path

import pytest

from lit_attn.report.__main__ import main

BASE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02]
SKEWED = [2.9, 2.95, 2.9, 2.92, 2.93, 5.0]
FILES = ("table.md", "table.full.md", "table.txt", "table.html")


def write_report(root: Path, groups: dict[str, list[float]], pairs: str) -> Path:
    """Write the report of a table and return its folder."""
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
