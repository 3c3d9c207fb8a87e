"""Audits of public runs: their pages, their numbers, and the readers of the logs."""

import json
import re
import statistics
from pathlib import Path

import pandas as pd
import pytest
import write_audits
from helpers.answers import read_answer
from helpers.paths import ROOT

from lit_attn import judge
from lit_attn.__main__ import main
from lit_attn.judging.table import load_reader

AUDITS = ROOT / "experiments" / "audits"
NAMES = sorted(path.stem for path in AUDITS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_what_the_command_writes(name: str) -> None:
    page = (ROOT / "docs" / "audits" / f"{name}.md").read_text(encoding="utf-8")
    assert write_audits.make_page(name) == page, "run python docs/generators/write_audits.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_number_on_the_page_follows_from_the_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_audits.make_page(name)
    for path in AUDITS.glob(f"{name}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(write_audits, "AUDITS", tmp_path)
    runs = pd.read_csv(tmp_path / f"{name}.csv")
    value = "val_bpb" if name == "parameter-golf" else "val_loss"
    runs.loc[runs["path"].str.contains("this_pr_v1-s1410|VarLenAttn/"), value] += 0.1
    runs.to_csv(tmp_path / f"{name}.csv", index=False)
    assert write_audits.make_page(name) != page


def test_the_means_are_those_that_the_project_prints() -> None:
    """Means and step counts of the README of 2026-05-07_XSAGatedLayers, and of two others."""
    runs = write_audits.read_runs(AUDITS / "modded-nanogpt.csv")
    printed = {
        "2026-04-29_XSAGatedLayers/baseline-s1410": (10, 3.2832),
        "2026-04-29_XSAGatedLayers/baseline-s1440": (10, 3.2794),
        "2026-04-29_XSAGatedLayers/this_pr_v1-s1410": (10, 3.2786),
        "2026-05-07_XSAGatedLayers/master-s1480": (7, 3.2799),
        "2026-05-07_XSAGatedLayers/xsa-gated-s1410": (11, 3.2789),
        "2026-04-22_MuddFormer/this_pr_v2": (10, 3.2781),
        "2026-05-27-MuddGatedAndDC/this_pr_v1": (11, 3.27714),
    }
    for folder, (count, mean) in printed.items():
        values = runs[runs["path"].str.contains(f"/{folder}/")]["val_loss"]
        assert len(values) == count
        assert statistics.fmean(values) == pytest.approx(mean, abs=6e-5)


def test_every_run_has_a_commit_and_a_path() -> None:
    for name in NAMES:
        runs = pd.read_csv(AUDITS / f"{name}.csv")
        (commit,) = set(runs["commit"])
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
        assert runs["path"].str.startswith("records/").all()
        assert not runs.duplicated().any()


def write_log(path: Path, step: int, loss: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "import torch\nprint(f'step:{step}/{train_steps} val_loss:{val_loss:.4f}')\n"
        "step:0/1450 val_loss:10.8258 train_time:0ms step_avg:0.01ms\n"
        f"step:{step}/1450 val_loss:{loss:.4f} train_time:{step * 54}ms step_avg:54.00ms\n"
        "peak memory allocated: 31344 MiB reserved: 45746 MiB\n"
    )


def test_the_logs_of_a_record_are_judged_where_they_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        write_log(tmp_path / "base" / f"{number}.txt", 1450, 3.2832 + 0.0005 * number)
        write_log(tmp_path / "xsa" / f"{number}.txt", 1450, 3.2786 + 0.0004 * number)
    # The last step is missing, so the run has failed.
    write_log(tmp_path / "xsa" / "6.txt", 1250, 3.4)
    (tmp_path / "notes.txt").write_text("no run\n")
    reader = f"{AUDITS / 'modded_nanogpt.py'}:read"
    words = ["judge", str(tmp_path), "--reader", reader, "--pairs", "none", "--metric", "val_loss"]
    main([*words, "--baseline", "base", "--json"])
    (study,) = read_answer(capsys.readouterr().out)["studies"]
    (variant,) = study["variants"]
    assert variant["values"]["n"] == 6
    assert variant["seeds"]["failed"] == 1
    assert variant["difference"]["mean"] == pytest.approx(-0.00485, abs=1e-6)
    assert variant["cost"]["seconds_per_seed"] == pytest.approx(78.3)


def test_the_tables_are_those_that_the_readers_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "records" / "track_1_short" / "2026-01-01_A"
    write_log(record / "a.txt", 1450, 3.28)
    submission = {"seed_results": {"42": {"val_bpb": 1.07}, "7": {"val_bpb": 1.08}, "8": {"x": 1}}}
    (record / "submission.json").write_text(json.dumps(submission))
    nanogpt = load_reader(f"{AUDITS / 'modded_nanogpt.py'}:read")
    (run,) = nanogpt(tmp_path)
    assert run["val_loss"] == "3.2800"
    print_table = load_reader(f"{AUDITS / 'modded_nanogpt.py'}:main")
    print_table(tmp_path, "c0de")
    assert capsys.readouterr().out == (
        "commit,path,step,steps,val_loss,train_time_ms\n"
        "c0de,records/track_1_short/2026-01-01_A/a.txt,1450,1450,3.2800,78300\n"
    )
    load_reader(f"{AUDITS / 'parameter_golf.py'}:main")(tmp_path, "c0de")
    assert capsys.readouterr().out == (
        "commit,path,seed,val_bpb\n"
        "c0de,records/track_1_short/2026-01-01_A/submission.json,42,1.07\n"
        "c0de,records/track_1_short/2026-01-01_A/submission.json,7,1.08\n"
    )


def test_seeds_of_a_readme_are_read_if_the_record_has_one_value(tmp_path: Path) -> None:
    (tmp_path / "submission.json").write_text('{"val_bpb": 1.1, "seeds": [1, 42, 7]}')
    (tmp_path / "README.md").write_text(
        "| Seed | Pre-TTT bpb | **Post-TTT bpb** | Artifact |\n|---|---|---|---|\n"
        "| **1** | 1.1217 | **1.1192** | 15,977,386 |\n| 42 | 1.1227 | 1.1200 | 15,876,510 |\n"
        "| 7 | ~1.12 | ~1.1 | ~15 |\n| Mean | 1.1 | 1.1196 | |\n\n| Seed | val_bpb |\n| 9 | 1.9 |\n"
    )
    runs = list(load_reader(f"{AUDITS / 'parameter_golf.py'}:read")(tmp_path))
    assert [(run["seed"], run["val_bpb"]) for run in runs] == [("1", 1.1192), ("42", 1.12)]


def test_p_is_corrected_over_all_comparisons() -> None:
    verdicts = write_audits.correct([0.04, None, 0.001], ["better", "undecided", "worse"])
    assert [verdict.word for verdict in verdicts] == ["better", "undecided", "worse"]
    assert [verdict.p for verdict in verdicts] == [0.04, None, 0.002]
    verdicts = write_audits.correct([0.04, 0.04], ["better", "better"])
    assert [verdict.word for verdict in verdicts] == ["undecided", "undecided"]


def judge_values(variant: list[float], baseline: list[float], claim: str) -> write_audits.Judged:
    sides = {"variant": variant, "baseline": baseline}
    rows = [(side, value) for side, values in sides.items() for value in values]
    runs = pd.DataFrame(rows, columns=["variant", "val_loss"])
    study = judge(runs, "val_loss:min", pairs="none", baseline="baseline")
    (judged,) = study.variants
    return write_audits.Judged({"claim": claim}, study, judged, "", None)


def test_a_claim_gets_the_answer_that_its_runs_allow() -> None:
    equal = judge_values([3.0, 3.2, 3.4, 3.6], [3.1, 3.2, 3.3, 3.6], "kept")
    undecided = write_audits.Verdict(1.0, "undecided")
    answer = write_audits.answer_claim(equal, undecided, None)
    assert equal.variant.difference is not None
    margin = f"{equal.variant.difference.high:.5f}"
    assert answer == f"not contradicted (worse by at most {margin})"
    better = write_audits.Verdict(0.001, "better")
    assert write_audits.answer_claim(equal, undecided, better) == "shown at equal time"
    worse = write_audits.Verdict(0.001, "worse")
    assert write_audits.answer_claim(equal, worse, better) == "contradicted"
    # Three runs a side cannot have p below .1, however far apart they are.
    few = judge_values([1.0, 1.1, 1.2], [9.0, 9.1, 9.2], "better")
    assert write_audits.answer_claim(few, undecided, None) == "cannot be tested"
    text = write_audits.summarise([], [answer, "not shown", "not shown", "cannot be tested"])
    assert "2 not shown, 1 not contradicted, 1 cannot be tested" in text
    assert "1 claims cannot be tested" in text
