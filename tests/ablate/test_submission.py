"""Submissions: the folder that `submit` writes, and what `judge` does with it elsewhere."""

import getpass
import json
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import fake_study
from helpers.paths import ROOT

from lit_attn.__main__ import main
from lit_attn.ablate import submission
from lit_attn.ablate.submission import Submission
from lit_attn.cells import records
from lit_attn.cells.decisions import Looks

VARIANTS = {"standard": 0.0, "good": 0.05, "bad": -0.05}
SEALED = ROOT / "reports" / "evidence" / "digits" / "seals.json"


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a submission with a failed seed and logs with private words."""
    monkeypatch.chdir(tmp_path)
    failures = {("bad", 1): "error"}
    study = fake_study.write_study(Path("runs"), variants=VARIANTS, seeds=8, failures=failures)
    plan = records.Plan.load(study / "plan.json")
    for number, cell in enumerate(plan.cells):
        folder = study / cell.path
        attempt = folder / "attempts" / "1"
        attempt.mkdir(parents=True, exist_ok=True)
        home = f"/home/{getpass.getuser()}"
        (attempt / "log.txt").write_text(
            f'File "{home}/secret/layer.py", line {number}\n'
            f"step 3 on {socket.gethostname()} by {getpass.getuser()}; data s3://bucket/x.bin\n"
            "node17: loss 0.5\n"
        )
        path = folder / "result.json"
        if path.exists():
            result = records.Result.model_validate_json(path.read_bytes())
            inputs = {f"{home}/a/part.py": "ab", f"{home}/b/part.py": "cd", f"{home}/x": "names e"}
            result.model_copy(update={"inputs": inputs}).write(path)
    shutil.copy(SEALED, study / "seals.json")
    records.Origin(file="../../../home/alice/ablations.yaml").write(study / "origin.json")
    assert main(["submit", "fake", "--hide", "node17"]) == 0
    return tmp_path / "submissions" / "fake"


def judge(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `judge`."""
    capsys.readouterr()
    code = main(["judge", str(folder), *words])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_copy_elsewhere_is_judged_to_the_same_bytes(
    sent: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = judge(sent, capsys, "--json")
    table = judge(sent, capsys)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    # Another machine has another name for the folder, and lacks the study and its file.
    copy = shutil.copytree(sent, elsewhere / "from-alice")
    shutil.rmtree(sent.parents[1] / "runs")
    monkeypatch.chdir(elsewhere)
    after = judge(copy, capsys, "--json")
    assert after[:2] == before[:2]
    assert after[1] == (copy / "judgement.json").read_text()
    assert judge(copy, capsys)[:2] == table[:2]
    answer = json.loads(after[1])["studies"][0]
    verdicts = {variant["variant"]: variant["verdict"] for variant in answer["variants"]}
    # With one failed seed of eight, 7 pairs decide.
    assert verdicts["good"] == "better"
    assert answer["next"]["command"] is None
    assert answer["sealed"]["hash"] == "c0987f0a099cff83"
    hash_of_all = Submission.model_validate_json((sent / "submission.json").read_bytes()).hash
    assert hash_of_all in after[2]


def test_the_verdicts_are_those_of_the_study(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, submitted, _ = judge(sent, capsys, "--json")
    capsys.readouterr()
    main(["judge", "fake", "--json"])
    original = json.loads(capsys.readouterr().out)
    copy = json.loads(submitted)
    for answer in (original, copy):
        # Only the sender's machine has the file that the command names.
        del answer["studies"][0]["next"]["command"]
    assert copy == original


def test_judging_writes_nothing_into_the_folder(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()}
    judge(sent, capsys)
    judge(sent, capsys, "--json")
    assert {path: path.read_bytes() for path in sent.rglob("*") if path.is_file()} == before


def change_value(folder: Path) -> str:
    path = sorted(folder.rglob("result.json"))[3]
    path.write_text(path.read_text().replace('"test/accuracy": 0.', '"test/accuracy": 0.9'))
    return f"{path.relative_to(folder)} has changed"


def remove_seed(folder: Path) -> str:
    path = sorted(folder.rglob("result.json"))[3]
    path.unlink()
    return f"{path.relative_to(folder)} is missing"


def add_look(folder: Path) -> str:
    Looks(entries=[]).write(folder / "fake" / "looks.json")
    return "fake/looks.json was added"


def change_judgement(folder: Path) -> str:
    (folder / "judgement.json").write_text("{}")
    return "judgement.json has changed"


def link_a_record(folder: Path) -> str:
    path = sorted(folder.rglob("result.json"))[3]
    other = folder.parent / "other.json"
    path.rename(other)
    path.symlink_to(other)
    return f"{path}: is no plain file"


def forge_hashes(folder: Path) -> str:
    path = folder / "submission.json"
    record = Submission.model_validate_json(path.read_bytes())
    files = record.files | {"fake/plan.json": "0" * 64}
    record.model_copy(update={"files": files}).write(path)
    return "hash: is not that of its files"


def tear_the_hashes(folder: Path) -> str:
    (folder / "submission.json").write_text('{"format": 1')
    return "submission.json: is not what `submit` writes"


def change_a_sealed_plan(folder: Path) -> str:
    """Change the sealed plan and write all hashes anew: the seal itself does not fit then."""
    path = folder / "fake" / "seals.json"
    path.write_text(path.read_text().replace('"goal": "max"', '"goal": "min"'))
    files = submission._hash_files(folder)
    record = Submission.model_validate_json((folder / "submission.json").read_bytes())
    changes = {"files": files, "hash": submission._hash_all(files)}
    record.model_copy(update=changes).write(folder / "submission.json")
    return "the plan was changed after it was sealed"


@pytest.mark.parametrize(
    "change",
    [
        change_value,
        remove_seed,
        add_look,
        change_judgement,
        link_a_record,
        forge_hashes,
        tear_the_hashes,
        change_a_sealed_plan,
    ],
)
def test_a_change_is_one_line(
    change: Callable[[Path], str], sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = change(sent)
    code, output, errors = judge(sent, capsys)
    assert (code, output) == (2, "")
    (line,) = errors.splitlines()
    assert expected in line


def test_a_judgement_of_other_versions_is_named(
    sent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = submission._find_versions()
    monkeypatch.setattr(submission, "_find_versions", lambda: {**versions, "numpy": "0.1"})
    _, _, errors = judge(sent, capsys)
    # Equal bytes need no explanation.
    assert "differs" not in errors
    text = (sent / "judgement.json").read_text()
    monkeypatch.setattr(submission, "write_judgement", lambda judged: f"{text} ")
    _, _, errors = judge(sent, capsys)
    assert f"numpy {versions['numpy']} (here 0.1)" in errors


def test_nothing_private_leaves_the_machine(sent: Path) -> None:
    texts = {path: path.read_text() for path in sent.rglob("*") if path.is_file()}
    assert all(path.suffix in (".json", ".txt", ".csv") for path in texts)
    assert not list(sent.rglob("origin.json"))
    logs = sorted(text for path, text in texts.items() if path.name == "log.txt")
    assert len(logs) == 24
    assert logs[0] == (
        'File "layer.py", line 0\nstep 3 on (removed) by (removed); data x.bin\n'
        "(removed): loss 0.5\n"
    )
    for text in texts.values():
        assert "/home" not in text
        assert socket.gethostname() not in text
        assert "secret" not in text
    result = records.Result.read_valid(next(sent.rglob("result.json")))
    assert result is not None
    assert result.inputs == {"part.py": "ab", "part.py (2)": "cd", "x": "names e"}


def test_only_whole_lines_at_the_end_of_a_long_log_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    line = "/home/alice/project/file.py failed\n"
    path.write_text(line * 5000)
    text = submission._Names([]).hide(submission._read_end(path))
    assert set(text.splitlines()) == {"file.py failed"}
    assert len(text) < submission.LOG_BYTES


def test_a_folder_of_submissions_names_one_of_them(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = judge(sent.parent, capsys)
    assert (code, output) == (2, "")
    assert errors.endswith(f"is a folder of submissions; name one, such as {sent}\n")


def test_a_folder_that_exists_is_never_replaced(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "fake"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "submissions/fake: exists already; name another folder with --to"


def test_a_submission_of_a_running_study_is_a_recorded_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fake_study.write_study(Path("runs"), variants=VARIANTS, seeds=9, skip=(("good", 8),))
    assert main(["submit", "runs/fake", "--to", "there"]) == 0
    assert "Not sealed" in capsys.readouterr().out
    looks = [Path("runs/fake/looks.json"), Path("there/fake/looks.json")]
    entries = [Looks.model_validate_json(path.read_bytes()).entries for path in looks]
    assert entries[0] == entries[1]
    assert [look.seeds for look in entries[0]] == [8]
    code, output, _ = judge(Path("there"), capsys, "--json")
    assert code == 1
    assert json.loads(output)["studies"][0]["is_interim"]


def test_no_command_changes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look at a running study is recorded where the study runs, not in its copy."""
    monkeypatch.chdir(tmp_path)
    fake_study.write_study(Path("runs"), variants=VARIANTS, seeds=9, skip=(("good", 8),))
    assert main(["submit", "fake", "--to", "there"]) == 0
    # Without this record a look would be recorded.
    Path("there/fake/looks.json").unlink()
    before = sorted(Path("there").rglob("*"))
    assert main(["report", "there", "--reports", "reports"]) == 0
    assert main(["judge", "fake", "--runs", "there"]) == 1
    assert sorted(Path("there").rglob("*")) == before


def test_a_committed_study_is_judged_from_its_submission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records of a real study, with tuning and measured times, pass through a submission."""
    archive = ROOT / "reports" / "evidence" / "digits-tuned" / "records.tar.xz"
    with tarfile.open(archive) as records_archive:
        records_archive.extractall(tmp_path / "runs", filter="data")
    (plan,) = (tmp_path / "runs").rglob("plan.json")
    target = tmp_path / "sent"
    assert main(["submit", str(plan.parent), "--to", str(target)]) == 0
    code, output, errors = judge(target, capsys, "--json")
    assert output == (target / "judgement.json").read_text()
    assert len(errors.splitlines()) == 1
    capsys.readouterr()
    assert main(["judge", str(plan.parent), "--json"]) == code
    original = json.loads(capsys.readouterr().out)["studies"][0]
    assert json.loads(output)["studies"][0]["variants"] == original["variants"]


@pytest.mark.process
def test_neither_command_imports_torch(sent: Path) -> None:
    code = (
        "import sys; from lit_attn.__main__ import main;"
        " main(['submit', 'fake', '--to', 'again']); main(['judge', 'again']);"
        " sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=sent.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
