"""`python -m lit_attn.ablate`: what it lists, what it runs, what it answers."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import studies
from helpers.paths import ROOT
from helpers.runs import TIMEOUT, call, cli, names, ran

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.display import Lines, Snapshot, clock, make_display
from lit_attn.cells.folder import Progress


def test_dry_run_imports_no_torch_and_writes_nothing(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok", "crash"))
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        "code = main(['ablations.yaml', '--dry-run'])\n"
        "heavy = {'torch', 'lightning', 'pandas', 'rich', 'multiprocessing'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 variants x 2 seeds = 4 cells: 4 missing" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_list_may_be_cut_short(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok"))
    with cli(tmp_path, "--dry-run", "--seeds", "10000") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tiny: A tiny study\n"
        process.stdout.close()
        assert process.wait(TIMEOUT) == 141


def test_run_then_again(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok", "ok-2"))
    code, output = call(tmp_path)
    assert code == 0
    assert "4 cells: 0 done, 4 to run" in output
    assert "the table of tiny" in output
    assert output.rstrip().endswith("reports/index.html")
    code, output = call(tmp_path)
    assert code == 0
    assert "4 cells: 4 done, 0 to run" in output
    assert set(ran(tmp_path).values()) == {1}
    code, output = call(tmp_path, "--seeds", "0,9")
    assert "4 cells: 2 done, 2 to run" in output
    assert "2 variants x 2 seeds = 4 cells: 4 done" in call(tmp_path, "--dry-run")[1]


def test_exit_code_and_retry(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok", "crashonce", "diverged"))
    assert call(tmp_path, "--seeds", "0,")[0] == 1
    code, output = call(tmp_path, "--seeds", "0,")
    assert code == 1
    assert "1 diverged before and would again: --retry" in output
    assert ran(tmp_path) == {"ok/0": 1, "crashonce/0": 2, "diverged/0": 1}
    assert call(tmp_path, "--seeds", "0,", "--retry")[0] == 1
    assert ran(tmp_path) == {"ok/0": 1, "crashonce/0": 2, "diverged/0": 2}


def test_limit_and_out(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok", "ok-2"))
    code, _ = call(tmp_path, "--limit", "1", "--out", "elsewhere", "--reports", "tables")
    assert code == 0
    assert len(list((tmp_path / "elsewhere").glob("*/*/*/result.json"))) == 1
    assert (tmp_path / "tables" / "tiny" / "table.md").exists()
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok"))
    (tmp_path / "taken").touch()
    code, output = call(tmp_path, "--out", "taken")
    assert (code, output) == (2, "--out taken: cannot be written: Not a directory\n")


@pytest.mark.parametrize("taken", ["taken", "taken/below", "tables/tiny"])
def test_reports_that_cannot_be_written_are_found_before_anything_runs(
    tmp_path: Path, taken: str
) -> None:
    studies.write(tmp_path, names("ok"))
    (tmp_path / "tables").mkdir()
    for name in ("taken", "tables/tiny"):
        (tmp_path / name).touch()
    code, output = call(tmp_path, "--reports", taken.removesuffix("/tiny"))
    assert code == 2
    assert output.startswith(f"--reports {taken}: cannot be written: ")
    assert output.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_smoke_keeps_apart(tmp_path: Path) -> None:
    studies.write(tmp_path, names("ok"))
    assert call(tmp_path, "--smoke")[0] == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["smoke"]
    log = (tmp_path / "runs" / "smoke" / "tiny@smoke" / "ran.txt").read_text()
    assert sorted(log.splitlines()) == ["ok/0 smoke", "ok/1 smoke"]
    plan = (tmp_path / "runs" / "smoke" / "tiny@smoke" / "plan.json").read_text()
    assert "the numbers mean nothing" in plan


def test_set_changes_every_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, names("ok"))
    monkeypatch.chdir(tmp_path)

    def identity(*arguments: str) -> str:
        assert main(["ablations.yaml", "--dry-run", "--seeds", "1", *arguments]) == 0
        return capsys.readouterr().out.split("seed 0")[1].split()[0]

    changed = {
        identity(),
        identity("--set", "training.epochs=3"),
        identity("--set", "attention={preset: belief2, zz: without}"),
        identity("--set", "attention=belief2", "--set", "zz=without", "--set", "ffn=with"),
    }
    assert len(changed) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr=1"], "--set lr=1: tiny: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (["--set", "training.epochs=0"],
         "--set training.epochs=0: tiny: variant 'ok': training.epochs: input should be greater"
         " than 0, not 0"),
        (["--set", "zz"], "--set zz: needs KEY=VALUE"),
        (["--set", "zz=["],
         "--set zz=[: not YAML: expected the node content, but found '<stream end>'"),
        (["--set", "zz=with", "--set", "zz=without"], "--set zz=without: 'zz' is set twice"),
        (["--study", "tin"], "ablations.yaml: no study 'tin'; did you mean 'tiny'?"),
        (["--seeds", "1,1"], "--seeds 1,1: a seed is written twice"),
        (["--seeds", "0"], "--seeds 0: needs a count, as 5, or seeds, as 0,50,100"),
        (["--seeds", "a"], "--seeds a: needs a count, as 5, or seeds, as 0,50,100"),
        (["--seeds", ","], "--seeds ,: needs a count, as 5, or seeds, as 0,50,100"),
        (["--seeds", "20251121"],
         "--seeds 20251121: a count is at most 10,000; one seed is written '20251121,'"),
        (["--seeds", "99999999999999999999,"],
         "--seeds 99999999999999999999,: a seed is at most 4294967295"),
        (["--jobs", "0"], "--jobs: needs a number from 1"),
        (["--stall", "0"], "--stall: needs a number of minutes above 0"),
        (["--time", "nan"], "--time: needs a number of minutes above 0"),
        (["--params"], "--params: goes with --dry-run"),
        (["--dryrun"], "--dryrun: is not an option; did you mean '--dry-run'?"),
        (["--seeds", "0", "1"],
         "1: one file of studies at a time; several seeds are written --seeds 0,1,2, several"
         " studies --study A --study B"),
    ],
)  # fmt: skip
def test_bad_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    studies.write(tmp_path, names("ok"))
    monkeypatch.chdir(tmp_path)
    assert main(["ablations.yaml", *arguments]) == 2
    assert capsys.readouterr().err == message + "\n"
    assert not (tmp_path / "runs").exists()


def test_params(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "baseline: a\ncells: {a: {}, b: {attention: belief2}, c: {ffn: none, match: none}}"
    path = studies.write(tmp_path, body)
    assert main([str(path), "--dry-run", "--params"]) == 0
    rows = {
        line.split()[0]: line.split()[1:]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ") and " seed " not in line
    }
    parameters = {name: int(rows[name][0].replace(",", "")) for name in ("a", "b", "c")}
    # One block of width 16: half an FFN unit's parameters is as near as a width can come.
    assert abs(parameters["a"] - parameters["b"]) <= (2 * 16 + 1) / 2
    assert parameters["c"] < parameters["a"]
    assert rows["a"][2] == "32"
    assert rows["b"][3] == "(matched)"
    assert rows["c"][2] == "none"


C = "tiny/c/0"


def test_time_left() -> None:
    idle = Snapshot(done=0, failed=0, waiting=[C] * 3, running=[], durations=[], slots=2)
    assert idle.eta() is None
    # Ten seconds in, of which the imports and the first, slow step have taken most.
    early = [("a", 10.0, Progress(9, 100, 0.5)), ("b", 10.0, Progress(50, 100))]
    first = Snapshot(done=0, failed=0, waiting=[C] * 3, running=early, durations=[], slots=2)
    assert first.eta() is None
    assert first.line() == "0 done, 2 running, 3 waiting"
    running = [("a", 5.0, Progress(1, 2, 5.0)), ("b", 5.0, None)]
    begun = Snapshot(done=0, failed=0, waiting=[C] * 4, running=running, durations=[], slots=2)
    # Ten seconds a cell at the pace of the one that tells: four waiting, two half done, two slots.
    assert begun.eta() == 25.0
    late = Snapshot(
        done=1, failed=0, waiting=[], running=running, durations=[("tiny/a/0", 6.0)], slots=2
    )
    assert late.eta() == 1.0
    assert late.line() == "1 done, 2 running, 0 waiting, about 0:01 left"
    assert (clock(59.6), clock(3725)) == ("1:00", "1:02:05")


def test_time_left_is_of_the_variant_and_the_study_that_wait() -> None:
    """A run of several studies, of which one takes long, says so neither of the short one."""
    durations = [("long/a/0", 100.0), ("short/a/0", 1.0), ("short/b/0", 2.0), ("short/b/1", 4.0)]

    def eta(*waiting: str) -> float | None:
        return Snapshot(4, 0, list(waiting), [], durations, slots=1).eta()

    assert eta("short/a/1") == 1.0
    assert eta("short/b/2", "long/a/1") == 103.0
    # Nothing has finished of the variant: its study tells, and of neither: the run.
    assert eta("short/c/0") == pytest.approx(7 / 3)
    assert eta("other/a/0") == pytest.approx(107 / 4)


def test_plain_lines_share_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display()
    assert isinstance(display, Lines)
    display = Lines(sys.stdout)
    snapshot = Snapshot(done=2, failed=1, waiting=[C], running=[], durations=[], slots=1)
    display.open()
    display.say("done a")
    display.say("done b")
    display.update(snapshot)
    display.update(snapshot)
    display.close()
    assert capsys.readouterr().out == "done a\ndone b  [2 done, 0 running, 1 failed, 1 waiting]\n"


def test_what_is_said_while_printing_is_not_lost() -> None:
    """As by a signal handler, the moment that a reader has the line before."""
    display = Lines(sys.stdout)

    class Answering(io.StringIO):
        def flush(self) -> None:
            if "first" in self.getvalue() and "second" not in self.getvalue():
                display.ask("second")

    display.stream = stream = Answering()
    display.ask("first")
    display.close()
    display.close()
    assert stream.getvalue() == "first\nsecond\n"


def test_live_table(tmp_path: Path) -> None:
    """On a terminal: the running cells with their steps, and names that are not markup."""
    from rich.console import Console

    from lit_attn.ablate.display import Live, _table

    running = [("tiny/residual=[red]/0", 5.0, Progress(1, 2, 5.0)), ("b", 5.0, None)]
    snapshot = Snapshot(done=0, failed=0, waiting=[C] * 4, running=running, durations=[], slots=2)
    with (tmp_path / "screen").open("w+") as screen:
        Console(file=screen, width=100).print(_table(snapshot))
        screen.seek(0)
        text = screen.read()
    assert "tiny/residual=[red]/0  0:05       1/2" in text
    assert "starting" in text
    assert "0 done, 2 running, 4 waiting, about 0:25 left" in text
    live = Live()
    live.open()
    live.say("FAILED [x]")
    live.update(snapshot)
    live.close()
