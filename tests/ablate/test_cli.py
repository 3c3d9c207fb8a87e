"""The command line `python -m lit_attn.ablate`: dry runs, runs, exit codes and error messages."""

import os
import tempfile
from pathlib import Path

import pytest
from helpers import studies
from helpers.commands import run_new_python, run_python
from helpers.fake_study import write_study
from helpers.runs import TIMEOUT, count_runs, make_body, run_cli, start_cli

from lit_attn.ablate.__main__ import main
from lit_attn.cells.records import Plan
from lit_attn.report import __main__ as report


def test_dry_run_imports_torch_alone_and_writes_nothing(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "crash"))
    code = (
        "import sys; from lit_attn.ablate.__main__ import main\n"
        "code = main(['ablations.yaml', '--dry-run'])\n"
        "heavy = {'lightning', 'torchmetrics', 'timm', 'torchvision', 'transformers', 'wandb',"
        " 'tokenizers', 'pandas', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = run_new_python(tmp_path, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 variants x 2 seeds = 4 cells: 4 missing" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_a_reader_may_close_the_pipe_of_a_dry_run(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    with start_cli(tmp_path, "--dry-run", "--seeds", "10000") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tiny: A tiny study\n"
        process.stdout.close()
        assert process.wait(TIMEOUT) == 141


def test_a_second_run_only_runs_new_cells(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "ok-2"))
    code, output = run_cli(tmp_path)
    assert code == 0
    assert "4 cells: 0 done, 4 to run" in output
    assert "the table of tiny" in output
    assert output.rstrip().endswith("reports/index.html")
    code, output = run_cli(tmp_path)
    assert code == 0
    assert "4 cells: 4 done, 0 to run" in output
    assert set(count_runs(tmp_path).values()) == {1}
    code, output = run_cli(tmp_path, "--seeds", "0,9")
    assert "4 cells: 2 done, 2 to run" in output
    assert "2 variants x 2 seeds = 4 cells: 4 done" in run_cli(tmp_path, "--dry-run")[1]


@pytest.mark.process
def test_limit_and_folders(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok", "ok-2"))
    code, _ = run_cli(tmp_path, "--limit", "1", "--out", "elsewhere", "--reports", "tables")
    assert code == 0
    assert len(list((tmp_path / "elsewhere").glob("*/*/*/result.json"))) == 1
    assert (tmp_path / "tables" / "tiny" / "table.md").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_an_unwritable_results_folder_is_one_error_line(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    (tmp_path / "taken").touch()
    code, output = run_cli(tmp_path, "--out", "taken")
    assert (code, output) == (2, "--out taken: cannot be written: Not a directory\n")
    (tmp_path / "link").symlink_to("nowhere")
    assert run_cli(tmp_path, "--out", "link") == (2, "--out link: is not a folder\n")
    (tmp_path / "runs" / "tiny" / "plan.json").mkdir(parents=True)
    message = "runs/tiny/plan.json: Is a directory\n"
    assert run_cli(tmp_path) == (2, message)


AS_OTHER_USER = (
    "import os, sys; from pathlib import Path; from lit_attn.ablate.__main__ import main\n"
    "main(sys.argv[1:])\n"  # Imports every module: another user may not be able to.
    "Path('runs').mkdir(mode=0o700)\n"
    "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    "code = main(sys.argv[1:]); sys.stdout.flush(); sys.stderr.flush()\n"
    "os._exit(code)\n"  # Folders that imported packages made belong to the first user.
)


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_results_of_another_user_are_one_line() -> None:
    """With the umask 077 nobody else can read a folder of runs."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        studies.write(Path(name), make_body("ok"))
        done = run_python(Path(name), "-c", AS_OTHER_USER, "ablations.yaml", "--dry-run")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    # The owner of the folder is read before its cells.
    assert line == "runs/tiny/origin.json: Permission denied"


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("place", ["runs", "runs/tiny"])
def test_the_status_names_a_folder_of_another_user(place: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "runs" / "tiny").mkdir(parents=True)
        (Path(name) / place).chmod(0o700)
        code = AS_OTHER_USER.replace("main(sys.argv[1:])\n", "", 1).replace("mkdir", "chmod")
        code = code.replace("Path('runs')", f"Path({place!r})")
        done = run_python(Path(name), "-c", code, "status")
    assert done.returncode == 2
    assert done.stderr == f"{place}: Permission denied\n"


@pytest.mark.process
def test_a_report_on_a_full_disk_is_one_line(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path / "runs", seeds=1)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "ballast").write_bytes(bytes(2**21))
    arguments = [str(tmp_path / "runs"), "--reports", str(small_disk / "reports")]
    assert report.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{small_disk}/reports")
    assert line.endswith(": No space left on device")


def test_a_file_system_without_locks_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    path = studies.write(tmp_path, make_body("ok"))
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    assert main([str(path)]) == 2
    assert "--out runs: its file system does not support the flock" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.process
def test_an_unwritable_reports_folder_is_reported_before_any_cell_runs(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    (tmp_path / "tables").mkdir()
    for name in ("taken", "tables/tiny"):
        (tmp_path / name).touch()
    for taken in ("taken", "taken/below", "tables/tiny"):
        code, output = run_cli(tmp_path, "--reports", taken.removesuffix("/tiny"))
        assert code == 2
        assert output.startswith(f"--reports {taken}: cannot be written: ")
        assert output.count("\n") == 1
        assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_smoke_results_have_their_own_folder(tmp_path: Path) -> None:
    studies.write(tmp_path, make_body("ok"))
    assert run_cli(tmp_path, "--smoke")[0] == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["smoke"]
    log = (tmp_path / "runs" / "smoke" / "tiny@smoke" / "ran.txt").read_text()
    assert sorted(log.splitlines()) == ["ok/0 smoke", "ok/1 smoke"]
    assert Plan.load(tmp_path / "runs" / "smoke" / "tiny@smoke" / "plan.json").is_smoke


def test_set_changes_every_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies.write(tmp_path, make_body("ok"))
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
        (["--set", "zz"], "--set zz: write KEY=VALUE"),
        (["--set", "zz=["],
         "--set zz=[: not YAML: expected the node content, but found the end of the text"),
        (["--set", "zz=with", "--set", "zz=without"], "--set zz=without: 'zz' is set twice"),
        (["--study", "tin"], "ablations.yaml: no study 'tin'; did you mean 'tiny'?"),
        *(
            (
                ["--seeds", text],
                f"--seeds {text}: write a count up to 10,000 such as 5, or different seeds up to "
                "4294967295 such as 0,50,100 or 7,",
            )
            for text in ("1,1", "0", "a", ",", "20251121", "99999999999999999999,")
        ),
        (["--jobs", "0"], "--jobs: the number must be positive"),
        (["--stall", "0"], "--stall: the number must be positive"),
        (["--stall", "nan"], "--stall: the number must be positive"),
        (["--params"], "--params: needs --dry-run"),
        (["--cancel-removed"], "--cancel-removed: needs --launcher slurm"),
        (["--estimate"], "--estimate: needs --dry-run"),
        (["--dryrun"], "--dryrun: unknown option; did you mean '--dry-run'?"),
        *(
            (
                ["--seeds", "0", word],
                f"'{word}' has no option before it, and there can be one file only; write --study "
                "before the name of each study, and seeds as --seeds 0,1,2",
            )
            for word in ("1", "")
        ),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_error_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    studies.write(tmp_path, make_body("ok"))
    monkeypatch.chdir(tmp_path)
    assert main(["ablations.yaml", *arguments]) == 2
    assert capsys.readouterr().err == message + "\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_params_shows_matched_parameter_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert rows["a"][4:7] == ["1", "of", "1"]
    # A network of images has no cache.
    assert rows["a"][7:9] == ["none", "32"]
    assert rows["b"][9] == "(matched)"
    assert rows["c"][8] == "none"
    # The experiment has no weight decay.
    assert rows["a"][1:3] == ["0", rows["a"][0]]


def test_params_shows_what_has_no_weight_decay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = "optimizer.weight_decay: 0.1, optimizer.decay: weights"
    body = f"baseline: a\ncells: {{a: {{{changes}}}, b: {{{changes}, attention: mgk}}}}"
    assert main([str(studies.write(tmp_path, body)), "--dry-run", "--params"]) == 0
    lines = capsys.readouterr().out.splitlines()
    header, first, second, names = lines[lines.index(next(n for n in lines if "MFLOPs" in n)) :][:4]
    assert "parameters       decayed   not decayed" in header
    for line in (first, second):
        total, decayed, exempt = (int(word.replace(",", "")) for word in line.split()[1:4])
        assert decayed + exempt == total
        assert exempt > 0
    assert names.startswith("  without weight decay: blocks.*.attn.proj.bias, ")
    assert "blocks.*.attn.similarity.prior" in names
    assert "cls_token" in names
    assert "blocks.*.attn.qkv.weight" not in names


@pytest.mark.parametrize(
    ("word", "choice"), [("statu", "status"), ("ablation.yaml", "ablations.yaml")]
)
def test_a_mistyped_command_or_file_gets_the_nearest_name(
    word: str,
    choice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    studies.write(tmp_path, make_body("ok"))
    monkeypatch.chdir(tmp_path)
    assert main([word]) == 2
    message = f"{word}: no such file or command; did you mean '{choice}'?\n"
    assert capsys.readouterr().err == message
