"""The command `judge` with runs of other programs, and mistakes as JSON."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.answers import read_answer
from helpers.fake_study import write_study

import lit_attn
from lit_attn.__main__ import main
from lit_attn.report.__main__ import main as report
from lit_attn.schema.error_answer import Place, find_place
from lit_attn.schema.errors import ConfigError

LOSSES = {"base": [3.1, 3.2, 3.0, 3.3, 3.15], "good": [2.1, 2.2, 2.0, 2.3, 2.15]}


def write_table(folder: Path) -> Path:
    path = folder / "runs.csv"
    rows = ["variant,val_loss,seconds,params"]
    for variant, losses in LOSSES.items():
        size = 1000 if variant == "base" else 1100
        rows += [f"{variant},{loss},{size / 100},{size}" for loss in losses]
    path.write_text("\n".join(rows) + "\n")
    return path


def judge(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    """Return the answer to `judge WORDS --json`; check its schema and the exit code."""
    assert main(["judge", *words, "--json"]) == code
    return read_answer(capsys.readouterr().out)


def test_runs_of_another_program_have_the_answer_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(tmp_path)
    words = [str(path), "--pairs", "none", "--baseline", "base"]
    (foreign,) = judge(words, capsys, 0)["studies"]
    write_study(tmp_path / "runs", variants={"standard": 0.0, "good": 0.05}, seeds=8)
    (study,) = judge(["--runs", str(tmp_path / "runs")], capsys, 0)["studies"]
    assert foreign.keys() == study.keys()
    (variant,) = foreign["variants"]
    assert variant.keys() == study["variants"][0].keys()
    assert variant["values"] == {
        "n": 5,
        "mean": 2.15,
        "sd": pytest.approx(0.1118034, rel=1e-6),
        "median": None,
        "events": None,
    }
    assert foreign["baseline_values"]["mean"] == 3.15
    assert variant["difference"]["mean"] == -1.0
    assert variant["cost"]["parameters"] == 1100
    assert variant["cost"]["seconds_spent"] == 55
    assert (variant["verdict"], foreign["validity"], foreign["pairs"]) == ("better", None, "none")
    assert (study["pairs"], study["baseline_values"]["n"]) == ("seed", 8)


BASE = [3.0, 3.1, 2.9, 3.05, 2.95, 3.02]
WIDE = [3.0, 4.0, 2.0, 3.5, 2.5, 3.2]
SKEWED = [2.9, 2.95, 2.9, 2.92, 2.93, 5.0]


@pytest.mark.parametrize(
    ("losses", "pairs", "advice"),
    [
        (WIDE, "none", "p is approximate"),
        (WIDE, "seed", ""),
        (SKEWED, "none", "p is approximate"),
        (SKEWED, "seed", "a star can mean another spread instead of another mean"),
        (BASE[::-1], "none", ""),
        (BASE[::-1], "seed", ""),
    ],
)
def test_spreads_that_make_a_star_doubtful_are_a_warning(
    losses: list[float],
    pairs: str,
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Paired seeds need symmetric differences, which wide values have if they are symmetric."""
    path = tmp_path / "runs.csv"
    rows = ["variant,seed,val_loss"]
    for variant, values in (("base", BASE), ("other", losses)):
        rows += [f"{variant},{seed},{value}" for seed, value in enumerate(values)]
    path.write_text("\n".join(rows) + "\n")
    words = [str(path), "--metric", "val_loss:min", "--pairs", pairs, "--baseline", "base"]
    (study,) = judge(words, capsys, 1)["studies"]
    warnings = [warning for warning in study["warnings"] if "standard deviation" in warning]
    if not advice:
        assert warnings == []
        return
    (warning,) = warnings
    assert warning.startswith("other: its standard deviation is ")
    assert advice in warning


def test_costs_of_own_records_stand_beside_the_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, "good": 0.05}, seeds=8)
    (study,) = judge(["--runs", str(tmp_path / "runs")], capsys, 0)["studies"]
    cost = study["variants"][0]["cost"]
    assert cost["parameters"] > 0
    assert cost["flops"] > 0
    assert cost["peak_memory"] > 0
    assert cost["step_time_ratio"] == pytest.approx(
        cost["step_time"] / study["baseline_cost"]["step_time"]
    )


def test_an_undecided_variant_needs_at_least_the_seeds_of_a_star(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`seeds missing 0 to 30` stood beside "Add 5 seeds"; a decided variant needs none."""
    effects = {"standard": 0.0, "same": 0.0, "good": 0.05}
    write_study(tmp_path / "runs", variants=effects, seeds=3)
    study = judge(["--runs", str(tmp_path / "runs")], capsys, 1)["studies"][0]
    for variant in study["variants"]:
        assert variant["verdict"] == "undecided"
        assert variant["seeds_needed"]["low"] >= 6
        assert variant["seeds_missing"]["low"] >= 3
    write_study(tmp_path / "more", variants=effects, seeds=8)
    study = judge(["--runs", str(tmp_path / "more")], capsys, 1)["studies"][0]
    needed = {variant["variant"]: variant["seeds_needed"] for variant in study["variants"]}
    assert needed["good"] is None
    assert needed["same"] is not None


@pytest.mark.parametrize(
    ("words", "kind", "place"),
    [
        (["runs.csv"], "config", ("runs.csv", None, None)),
        (["runs.csv", "--pairs", "none"], "config", ("runs.csv", None, None)),
        (["bad.csv", "--pairs", "none", "--baseline", "a"], "config", ("bad.csv", 2, "loss")),
        (["runs.csv", "--paris", "none"], "usage", (None, None, None)),
        (["runs.csv", "--margin", "x"], "usage", (None, None, None)),
        (["nothing.csv", "--pairs", "none"], "config", ("nothing.csv", None, None)),
        (["--pairs", "none"], "usage", (None, None, "--pairs")),
    ],
)
def test_a_mistake_is_json_too(
    words: list[str],
    kind: str,
    place: tuple[str | None, int | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path)
    (tmp_path / "bad.csv").write_text("variant,loss\na,x\nb,2\n")
    if words[0] == "bad.csv":
        words = [*words, "--metric", "loss"]
    assert main(["judge", *words, "--json"]) == 2
    printed = capsys.readouterr()
    answer = read_answer(printed.out)
    error = answer["error"]
    assert (error["file"], error["line"], error["key"]) == place
    assert error["kind"] == kind
    assert printed.err == error["message"] + "\n"


def test_other_commands_print_their_mistakes_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report(["--csv", "nothing.csv", "--pairs", "seed", "--json"]) == 2
    assert read_answer(capsys.readouterr().out)["error"]["file"] == "nothing.csv"
    (tmp_path / "ablations.yaml").write_text("studies:\n  tiny:\n    seedss: 3\n")
    assert main(["run", "ablations.yaml", "--dry-run", "--json"]) == 2
    error = read_answer(capsys.readouterr().out)["error"]
    assert (error["file"], error["kind"]) == ("ablations.yaml", "config")
    assert (error["line"], error["key"]) == (3, "studies.tiny.seedss")


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("study.yaml:12: seeds: 5 exceeds 3", Place("study.yaml", 12, "seeds")),
        ("a/b.yaml: tiny: cells.a.zz: has no effect", Place("a/b.yaml", None, "tiny.cells.a.zz")),
        ("runs: contains no study", Place(None, None, "runs")),
        ("no place at all: never", Place(None, None, None)),
    ],
)
def test_the_place_stands_at_the_beginning_of_a_message(message: str, place: Place) -> None:
    assert find_place(message) == place


def test_a_folder_of_studies_is_named_with_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", variants={"standard": 0.0, "good": 0.05}, seeds=8)
    assert main(["judge", str(tmp_path / "runs"), "--pairs", "none"]) == 2
    assert f"write --runs {tmp_path / 'runs'}" in capsys.readouterr().err


@pytest.mark.parametrize("function", [lit_attn.judge, lit_attn.find_laws])
def test_other_objects_than_frames_of_runs_are_refused(function: Any) -> None:
    """The last one of two columns with one name was used."""
    options = {"pairs": "none"} if function is lit_attn.judge else {"cost": "steps"}
    rows = {"variant": ["a", "b"], "loss": [1.0, 2.0], "steps": [1, 2]}
    frame = pd.DataFrame(rows)
    doubled = pd.concat([frame, frame[["loss"]] + 5], axis=1)
    wrong = [
        ([rows], r"runs: needs a path or a pandas frame, .* not a list"),
        (doubled, "frame: has the column 'loss' twice"),
        (frame[:0], "frame: contains no run"),
    ]
    for runs, message in wrong:
        with pytest.raises(ConfigError, match=message):
            function(runs, "loss:min", baseline="a", **options)
    with pytest.raises(ConfigError, match="reader: reads a path, and the runs are a frame"):
        function(frame, "loss:min", baseline="a", reader="mine.py:read", **options)


@pytest.mark.process
@pytest.mark.parametrize(
    "statement",
    [
        "assert main('judge runs.csv --pairs none --baseline base --json'.split()) == 0",
        "assert main('judge --runs runs --json'.split()) == 1",
        "assert main('laws laws.csv --cost c --metric l:min --baseline base'.split()) == 0",
        "compared = compare(pd.read_csv('runs.csv'), pairs='none', baseline='base')\n"
        "assert compared.verdict.tolist() == ['baseline', 'better']",
    ],
    ids=["table", "records", "laws", "frame"],
)
def test_judging_imports_no_torch(statement: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    write_study(tmp_path / "runs")
    (tmp_path / "laws.csv").write_text("variant,c,l\nbase,1,2\nbase,2,1.5\nidea,2,1.4\n")
    code = (
        "import sys; import pandas as pd; from lit_attn.__main__ import main\n"
        "from lit_attn.report import compare\n"
        f"{statement}\n"
        "assert not {'torch', 'lightning', 'timm', 'matplotlib'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
