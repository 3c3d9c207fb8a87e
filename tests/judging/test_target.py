"""Groups of runs against a fixed target: the rule of a record, at any number of looks."""

import csv
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.answers import read_answer
from helpers.paths import ROOT
from scipy import stats as scipy_stats

from lit_attn.__main__ import main
from lit_attn.judging.runs import judge_target
from lit_attn.report.statistics.target import e_value, find_t, runs_needed

AUDITS = ROOT / "experiments" / "audits"
LOOKS = 40
LEVEL = 0.01


def find_bound(count: int) -> float:
    """Return the smallest t with which `count` runs pass."""
    low, high = 0.0, 100.0
    if e_value(high, count) < 1 / LEVEL:
        return math.inf
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if e_value(middle, count) >= 1 / LEVEL else (middle, high)
    return high


def test_the_level_holds_after_every_run_and_one_deviation_needs_few_runs() -> None:
    """The t test after each of up to 40 runs passes in 6.5 of 100 cases at the target."""
    bounds = np.array([find_bound(count) for count in range(2, LOOKS + 1)])
    counts = np.arange(2, LOOKS + 1)

    def find_runs(effect: float) -> np.ndarray:
        values = np.random.default_rng(0).normal(effect, 1, (10_000, LOOKS))
        sums = values.cumsum(axis=1)[:, 1:]
        squares = (values**2).cumsum(axis=1)[:, 1:]
        variances = (squares - sums**2 / counts) / (counts - 1)
        passes = sums / counts / np.sqrt(variances / counts) >= bounds
        return np.where(passes.any(axis=1), passes.argmax(axis=1) + 2, LOOKS + 1)

    assert (find_runs(0.0) <= LOOKS).mean() <= LEVEL
    assert (find_runs(-0.2) <= LOOKS).mean() <= LEVEL / 4
    plain = next(n for n in range(2, 99) if power_of_t_test(n) >= 0.8)
    assert plain == 13
    assert find_runs(1.0).mean() <= 1.3 * plain


def power_of_t_test(count: int) -> float:
    critical = scipy_stats.t.ppf(1 - LEVEL, count - 1)
    return float(scipy_stats.nct.sf(critical, count - 1, math.sqrt(count)))


def test_an_e_value_is_the_ratio_of_densities_of_t() -> None:
    """The mixture of noncentral densities is computed here by another route."""
    from lit_attn.report.statistics.target import CENTRE, EFFECTS, WIDTH

    weights = np.exp(-(((EFFECTS - CENTRE) / WIDTH) ** 2) / 2)
    for t, count in ((2.5, 5), (-1.0, 8), (4.0, 30)):
        densities = scipy_stats.nct.pdf(t, count - 1, EFFECTS * math.sqrt(count))
        ratio = (weights * densities).sum() / weights.sum() / scipy_stats.t.pdf(t, count - 1)
        assert e_value(t, count) == pytest.approx(ratio, rel=1e-3)


def test_the_record_book_has_the_p_of_the_authors() -> None:
    """All p agree whose runs have logs; of eight records the logs are of other runs, or one run."""
    reader = f"{AUDITS / 'modded_nanogpt.py'}:read_records"
    book = judge_target(AUDITS / "modded-nanogpt.csv", "val_loss:min", 3.28, reader=reader)
    groups = {group.group: group for group in book.groups}
    with (AUDITS / "modded-nanogpt-records.csv").open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    agreeing = []
    for entry in published:
        group = groups[entry["group"]]
        if group.values.n != int(entry["runs"]):
            continue
        decimals = -int(Decimal(entry["p"]).as_tuple().exponent)
        assert group.p_t_test is not None
        assert round(group.p_t_test, decimals) == pytest.approx(float(entry["p"])), entry
        agreeing.append(entry["group"].partition("/")[0])
    assert (len(published), len(agreeing), len(set(agreeing))) == (43, 35, 32)
    assert groups["2025-09-03_FA3"].verdict == "passes"


def test_a_record_of_nanochat_has_the_p_of_its_runs() -> None:
    """Record 4 has seven runs, and its page names no other record's single runs but one of each."""
    (group,) = judge_target(AUDITS / "nanochat.csv", "core:max", 0.256525, variant="record").groups
    assert (group.values.n, group.verdict) == (7, "undecided")
    assert group.values.mean == pytest.approx(0.25714, abs=5e-6)
    assert group.values.sd == pytest.approx(0.00523, abs=5e-6)
    assert group.p_t_test == pytest.approx(0.38, abs=0.005)


def write(path: Path, groups: dict[str, list[float | str]], column: str = "variant") -> Path:
    lines = [f"{column},loss"]
    for name, values in groups.items():
        lines += [f"{name},{value}" for value in values]
    path.write_text("\n".join(lines) + "\n")
    return path


NOISE = [0.001, -0.002, 0.0015, 0.0, -0.001, 0.0005, -0.0005, 0.002]


def test_the_command_judges_groups_against_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups: dict[str, list[float | str]] = {
        "ours": [3.276 + noise for noise in NOISE],
        "near": [3.2795 + noise for noise in NOISE],
        "far": [3.3 + noise for noise in NOISE],
        "torn": [*(3.27 + noise for noise in NOISE), "nan"],
        "once": [3.2],
    }
    path = write(tmp_path / "runs.csv", groups)
    words = ["judge", str(path), "--metric", "loss:min", "--target", "3.28"]
    assert main(words) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "ours (3.2762 ± 0.0013, p 0.0019) passes; far misses the target; near, torn" in printed
    assert main([*words, "--json"]) == 1
    answer = read_answer(capsys.readouterr().out)
    assert answer["studies"] == []
    (book,) = answer["targets"]
    groups_by_name = {group["group"]: group for group in book["groups"]}
    ours = scipy_stats.ttest_1samp(groups["ours"], 3.28, alternative="less")
    assert groups_by_name["ours"]["p_t_test"] == pytest.approx(float(ours.pvalue))
    assert groups_by_name["torn"]["failed"] == 1
    assert groups_by_name["near"]["runs_missing"] > 1
    assert f"Run near {groups_by_name['near']['runs_missing']} more times" in book["next"]
    assert main([*words, "--where", "variant=ours", "--level", "1e-9"]) == 1
    assert main([*words, "--where", "variant=ours"]) == 0


def test_a_file_without_variants_is_one_group(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.csv", {str(k): [0.9 + noise] for k, noise in enumerate(NOISE)}, "k"
    )
    (group,) = judge_target(path, "loss:max", 0.85).groups
    assert (group.group, group.verdict, group.values.n) == ("mine", "passes", 8)


def test_the_first_passing_step_is_found_from_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = {"900": 3.27, "1000": 3.2799, "1100": 3.276, "1200": 3.275}
    steps = {step: [mean + noise for noise in NOISE] for step, mean in means.items()}
    path = write(tmp_path / "runs.csv", steps, "step")
    answer = judge_target(path, "loss:min", 3.28, variant="step")
    # 900 steps pass, too, but 1000 do not.
    assert answer.first_passing == "1100"
    assert judge_target(path, "loss:min", 3.0, variant="step").first_passing is None
    lines = path.read_text().splitlines()
    timed = [f"{line},{line.split(',')[0]}00" for line in lines[1:]]
    path.write_text("\n".join(["step,loss,train_time_ms", *timed]))
    main(["judge", str(path), "--metric", "loss:min", "--target", "3.28", "--variant", "step"])
    printed = capsys.readouterr().out
    assert "from which on all pass is 1100, with 110 s for each run." in printed


def test_runs_needed_reach_the_level() -> None:
    gains = [1.0, -0.5, 1.5, 0.2]
    t = find_t(gains)
    assert t is not None
    needed = runs_needed(t, 4, LEVEL)
    assert needed is not None
    effect = t / 2
    assert e_value(effect * math.sqrt(needed), needed) >= 1 / LEVEL
    assert e_value(effect * math.sqrt(needed - 1), needed - 1) < 1 / LEVEL
    assert runs_needed(-t, 4, LEVEL) is None
    assert find_t([1.0]) is find_t([0.1 + 0.2, 0.3]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", "3.28", "--baseline", "a"], "--baseline: is for a baseline; leave it out"),
        (["--target", "3.28", "--stream"], "--stream: is for a baseline; leave it out"),
        (["--level", ".01", "--pairs", "none"], "--level: needs --target"),
        (["--target", "inf"], "--target: needs a finite number"),
        (["--target", "3.28", "--level", "1"], "'1' is not a number between 0 and 1"),
    ],
)
def test_a_wrong_option_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "runs.csv", {"a": [1.0, 2.0]})
    try:
        code: Any = main(["judge", str(path), "--metric", "loss:min", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
