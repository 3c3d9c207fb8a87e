"""The command `judge`: verdicts, the next action, and the answer in JSON."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.answers import read_answer
from helpers.fake_study import make_seal, read, report, rows, write_study

from lit_attn.__main__ import main
from lit_attn.answer_schemas import ANSWERS
from lit_attn.cells.decisions import Seals
from lit_attn.cells.records import Origin
from lit_attn.report.tables.judgement import describe_answer, join_names
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.tasks.metrics import DEFAULT_METRIC

pytestmark = pytest.mark.usefixtures("no_rendering")

MARGIN = DEFAULT_METRIC.model_copy(update={"margin": 1.0})
VARIANTS = {"standard": 0.0, "same": 0.0, "good": 0.05, "bad": -0.05}


def judge(path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """Return the answer about the only study in `path`/runs; check schema and exit code."""
    assert main(["judge", "--runs", str(path / "runs"), "--json"]) == code
    return read_answer(capsys.readouterr().out)["studies"][0]


def by_name(study: dict[str, Any]) -> dict[str, Any]:
    return {variant["variant"]: variant for variant in study["variants"]}


def test_verdicts_with_a_margin_are_those_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=8, metric=MARGIN)
    study = judge(tmp_path, capsys)
    variants = by_name(study)
    verdicts = {name: variant["verdict"] for name, variant in variants.items()}
    assert verdicts == {"same": "equivalent", "good": "better", "bad": "worse"}
    table = rows(report(tmp_path))
    for name, variant in variants.items():
        assert variant["verdict"] == table.loc[name, "verdict"]
        assert variant["p"] == pytest.approx(table.loc[name, "p_adjusted"])
        assert variant["difference"]["low"] == pytest.approx(table.loc[name, "low"])
    assert study["rule"] == "margin"
    assert study["next"]["kind"] == "none"
    assert study["next"]["command"] is None


def test_without_a_margin_the_star_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=8)
    study = judge(tmp_path, capsys, code=1)
    verdicts = {name: variant["verdict"] for name, variant in by_name(study).items()}
    assert verdicts == {"same": "undecided", "good": "better", "bad": "worse"}
    assert study["rule"] == "star"


def test_a_lower_loss_is_better(tmp_path: Path) -> None:
    metric = {"name": "test/loss", "label": "loss", "goal": "min", "scale": 1}
    record = read(tmp_path, variants=VARIANTS, seeds=8, metric=metric)
    verdicts = {variant.variant: variant.verdict for variant in judge_study(record).variants}
    # The loss of the fake cells is one minus their accuracy.
    assert verdicts["good"] == "better"
    assert verdicts["bad"] == "worse"


def test_a_missing_seed_is_an_interim_look_and_the_next_action_is_to_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "runs", variants=VARIANTS, seeds=8, skip=(("good", 7),))
    Origin(file="../../ablations.yaml").write(folder / "origin.json")
    study = judge(tmp_path, capsys, code=1)
    assert study["is_interim"]
    good = by_name(study)["good"]
    assert good["seeds"] == {"done": 7, "planned": 8, "failed": 0, "pairs": 7}
    assert not good["is_final"]
    assert by_name(study)["bad"]["is_final"]
    action = study["next"]
    assert action["kind"] == "run"
    assert action["cells"] == 1
    assert action["seconds"] == pytest.approx(61.5)
    assert action["variants"] == ["good"]
    assert f"run {tmp_path / 'ablations.yaml'} --study fake" in action["command"]


def test_undecided_verdicts_ask_for_the_fewest_further_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "runs", variants={"standard": 0.0, "good": 0.02}, seeds=4)
    Origin(file="../../ablations.yaml").write(folder / "origin.json")
    study = judge(tmp_path, capsys, code=1)
    good = by_name(study)["good"]
    # A second look has the level 0.0125, for which a star needs 8 pairs.
    assert good["pairs_for_verdict"] == 8
    action = study["next"]
    assert action["kind"] == "add-seeds"
    assert action["command"].endswith(f"--seeds 8 --out {tmp_path / 'runs'}")
    assert action["cells"] == 2 * 4


def test_added_seeds_lower_the_level_of_the_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_study(tmp_path / "runs", variants=VARIANTS, seeds=8)
    entries = [
        make_seal(time="2026-01-01", seeds=[0, 1, 2, 3]),
        make_seal(time="2026-01-02", seeds=list(range(8)), results=16),
    ]
    Seals(entries=entries).write(folder / "seals.json")
    study = judge(tmp_path, capsys, code=1)
    assert study["look"] == 2
    assert study["level"] == 0.0125
    assert study["sealed"]["is_before_results"]
    assert study["sealed"]["added_seeds"] == [4, 5, 6, 7]


def test_a_failed_seed_is_never_dropped_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {("good", seed): "diverged" for seed in range(4)}
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=8, failures=failures)
    study = judge(tmp_path, capsys, code=1)
    good = by_name(study)["good"]
    # The seeds that finished are all better, but half of them failed.
    assert good["verdict"] == "undecided"
    assert good["seeds"]["failed"] == 4
    assert good["pairs_for_verdict"] is None


def test_the_text_has_one_line_for_each_variant_and_the_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(tmp_path / "runs", variants=VARIANTS, seeds=8)
    monkeypatch.chdir(tmp_path)
    assert main(["judge", "fake"]) == 1
    by_study = capsys.readouterr().out
    lines = by_study.splitlines()
    assert lines[0] == "fake: A study that never ran; accuracy (%), higher is better; 8 seeds"
    # The answer has the numbers of the strongest variant, and comes before the table.
    answer = " ".join(by_study.partition("\nvariant ")[0].split())
    assert "fake: against standard, good is better (+4.80 [" in answer
    assert "p 0.008); bad is worse; same is undecided. Next: " in answer
    table = lines[-6:]
    assert table[0].startswith("variant ")
    assert len({len(line) for line in table}) == 1
    assert main(["judge", "runs/fake"]) == 1
    assert capsys.readouterr().out == by_study


def test_many_undecided_variants_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of names without a verdict would hide that there is none."""
    variants = {"standard": 0.0} | {f"same-{number}": 1e-4 for number in range(8)}
    write_study(tmp_path / "runs", variants=variants, seeds=3)
    monkeypatch.chdir(tmp_path)
    assert main(["judge", "fake"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "fake: against standard, all 8 variants are undecided; the smallest p has" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["judge"], "runs: contains no study"),
        (["judge", "fak", "--runs", "other"], "other: has no study 'fak'; did you mean 'fake'?"),
    ],
)
def test_a_wrong_study_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_study(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_command_prints_the_schema_of_each_answer_without_torch() -> None:
    code = (
        "import sys; from lit_attn.__main__ import main;"
        f"[main(['schema', name]) for name in {list(ANSWERS)}];"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    decoder = json.JSONDecoder()
    rest = done.stdout
    for name in ANSWERS:
        schema, end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()
        assert schema["properties"]["command"]["const"] == name
        for part in (schema, *schema["$defs"].values()):
            assert part["additionalProperties"] is False
            assert part["required"] == list(part["properties"])


def test_long_lists_of_names_are_cut() -> None:
    assert join_names(["a"]) == "a"
    assert join_names(["a", "b", "c"]) == "a, b and c"
    assert join_names(list("abcdefgh")) == "a, b, c, d, e and 3 others"


def test_a_study_of_the_baseline_alone_has_no_verdict(tmp_path: Path) -> None:
    judged = judge_study(read(tmp_path, variants={"standard": 0.0}))
    assert "no variant to compare" in describe_answer(judged)
