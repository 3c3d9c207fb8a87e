"""Cells whose folder contains links, results and checkpoints that training must not trust."""

import contextlib
import errno
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers.commands import run_python
from helpers.finished_cells import assert_same
from helpers.stopping import run_until
from helpers.training_cells import digits_cell, folder_of, result_of

from lit_attn.cells.folder import read_cell
from lit_attn.config.cell import Cell
from lit_attn.schema.errors import ConfigError
from lit_attn.train import run_cell
from lit_attn.training import fit
from lit_attn.training.checkpoints import Checkpoints
from lit_attn.training.process_group import ProcessGroup
from lit_attn.training.provenance import Provenance
from lit_attn.training.recording import Console, Progress
from lit_attn.training.timing import HostClock


def stop_after(step: int, folder: Path) -> Path:
    """Train `folder` up to `step`; return its newest checkpoint."""
    run_until(step, folder)
    return max((folder / "checkpoints").glob("step-*.ckpt"))


def train_alone(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_python(folder, "-m", "lit_attn.train", str(folder))


@pytest.mark.parametrize(
    "name",
    ["tmp", "checkpoints", "progress.json", "metrics.csv", "pictures", "attempts", "smoke/tmp"],
)
def test_nothing_is_written_renamed_or_deleted_through_a_link(name: str, tmp_path: Path) -> None:
    """The target is a folder or a file elsewhere, and stays as it is."""
    folder = folder_of(digits_cell(training={"max_steps": 1}), tmp_path / "runs")
    target = tmp_path / "precious"
    if "." in name:
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "step-000000001.ckpt").write_text("precious")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(target)
    message = f"{folder / name}: is a symbolic link to {target}. Delete it."
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_cell(folder)
    file = target if "." in name else target / "step-000000001.ckpt"
    assert file.read_text() == "precious"


def test_a_link_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    folder = folder_of(digits_cell(training={"max_steps": 1}), tmp_path / "runs")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (folder / "tmp").symlink_to(precious)
    done = train_alone(folder)
    assert done.returncode == 2
    assert done.stderr == f"{folder}/tmp: is a symbolic link to {precious}. Delete it.\n"
    assert (precious / "file").exists()


@pytest.mark.process
def test_a_result_names_the_code_of_all_attempts(
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The package and the version of torch change between two attempts."""
    folder = folder_of(digits_cell(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fit, "code_hash", lambda parts: "oldoldoldold")
        patch.setattr(fit, "package_versions", lambda: {"torch": "1.0"})
        run_until(5, folder)
    run_until(7, folder)
    run_cell(folder)
    result, expected = result_of(folder), result_of(uninterrupted)
    assert result.code == f"oldoldoldold+{expected.code}"
    assert result.data == expected.data
    assert result.versions["torch"] == f"1.0+{expected.versions['torch']}"
    lines = capsys.readouterr().out.splitlines()
    message = (
        f"The checkpoint was written with other code: oldoldoldold then, {expected.code} now. "
        "The result names both."
    )
    assert lines.count(message) == 1


def test_a_newer_result_is_read_and_kept(uninterrupted: Path, tmp_path: Path) -> None:
    folder = folder_of(digits_cell(), tmp_path)
    text = (uninterrupted / "result.json").read_text().replace("{", '{"carbon": 1.5,', 1)
    (folder / "result.json").write_text(text)
    assert read_cell(folder, digits_cell().fingerprint).state == "done"
    done = train_alone(folder)
    assert (done.returncode, done.stderr) == (0, "")
    command = "python -m lit_attn.ablate rerun CELL FILE"
    assert done.stdout == f"{folder}: has a result already; `{command}` repeats it\n"
    assert (folder / "result.json").read_text() == text


@pytest.mark.process
@pytest.mark.parametrize("text", ['{"torn', '{"identity": "of another cell"}'])
def test_an_unreadable_result_is_set_aside(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(digits_cell(training={"max_steps": 1}), tmp_path)
    (folder / "result.json.unreadable").write_text("an earlier one")
    (folder / "result.json").write_text(text)
    run_cell(folder)
    assert result_of(folder).steps == 1
    assert (folder / "result.json.unreadable").read_text() == "an earlier one"
    assert (folder / "result.json.2.unreadable").read_text() == text
    line = f"{folder}/result.json: cannot be read; renamed to result.json.2.unreadable"
    assert line in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize(
    "damage", ["other callbacks", "other shapes", "no optimizer", "other keys"]
)
def test_a_checkpoint_that_does_not_fit_is_set_aside(
    damage: str, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier checkpoint fits, and training ends with the usual result."""
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    newest = stop_after(6, folder)
    state = torch.load(newest, weights_only=True)
    if damage == "other callbacks":
        state["callbacks"] = {name: {"steps": 6} for name in state["callbacks"]}
    elif damage == "other shapes":
        state["state_dict"] = {k: v.flatten()[:1] for k, v in state["state_dict"].items()}
    elif damage == "no optimizer":
        state["optimizer_states"] = [{}]
    else:
        state = {"epoch": 1, "model": state["state_dict"]}
    torch.save(state, newest)
    run_cell(folder)
    assert f"checkpoint {newest.name} does not fit this cell (" in capsys.readouterr().out
    assert newest.with_name(f"{newest.name}.unreadable").exists()
    assert_same(folder, uninterrupted)


def test_a_checkpoint_with_other_bits_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.load would accept the flipped bit, and answers the other bytes with an IndexError."""
    for step in (1, 2, 3):
        torch.save({"weight": torch.ones(1000)}, tmp_path / f"step-00000000{step}.ckpt")
    flipped = bytearray((tmp_path / "step-000000002.ckpt").read_bytes())
    flipped[flipped.index(torch.ones(1000).numpy().tobytes()) + 2000] ^= 1
    (tmp_path / "step-000000002.ckpt").write_bytes(flipped)
    with zipfile.ZipFile(tmp_path / "step-000000003.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02s.")
        archive.writestr("archive/version", b"3\n")
    group = ProcessGroup(0, 1, torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path, 0, 1.0, group, lambda: Provenance("c", "d", {}, {}))
    assert checkpoints.find_newest() == tmp_path / "step-000000001.ckpt"
    assert capsys.readouterr().out.count("does not load") == 2
    assert len(list(tmp_path.glob("*.unreadable"))) == 2


MACHINE_ERRORS = [
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.distributed.DistBackendError("NCCL communicator was aborted"),
]


@pytest.mark.parametrize(
    "error", [*MACHINE_ERRORS, OSError(errno.EACCES, "a"), TimeoutError(110, "b"), MemoryError()]
)
def test_a_machine_that_cannot_read_sets_no_checkpoint_aside(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-000000001.ckpt"
    torch.save({"weight": torch.ones(10)}, path)
    group = ProcessGroup(0, 1, torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path, 0, 1.0, group, lambda: Provenance("c", "d", {}, {}))
    monkeypatch.setattr("torch.load", Mock(side_effect=error))
    with pytest.raises(type(error)):
        checkpoints.find_newest()
    assert path.exists()


FAILURES: dict[str, Exception] = {
    "lit_attn.tasks.base.TaskModule.training_step": KeyError("a bug"),
    # A checkpoint is written after others were restored.
    "lit_attn.training.checkpoints.Checkpoints.state_dict": KeyError("a bug"),
    # All ranks wait for each other after each has restored the checkpoint.
    "lightning.pytorch.strategies.SingleDeviceStrategy.barrier": RuntimeError("lost peer"),
    # Restoring itself fails, for a reason that is not the checkpoint.
    "lit_attn.training.checkpoints.Checkpoints.load_state_dict": MACHINE_ERRORS[0],
}


@pytest.mark.process
def test_an_error_of_another_cause_sets_no_checkpoint_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(digits_cell(training={"checkpoint_every": 1e-9}), tmp_path)
    newest = stop_after(6, folder)
    kept = sorted(newest.parent.iterdir())
    for method, error in FAILURES.items():

        def fail(_: object, *arguments: object, error: Exception = error) -> None:
            # The ranks also wait for each other before and after the setup.
            if arguments[:1] not in [("pre_setup",), ("post_setup",)]:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(method, fail)
            with pytest.raises(type(error), match=re.escape(str(error.args[0]))):
                run_cell(folder)
        assert sorted(newest.parent.iterdir()) == kept, method


@pytest.mark.process
def test_temporary_files_of_killed_attempts_are_removed(tmp_path: Path) -> None:
    folder = folder_of(digits_cell(training={"max_steps": 1}), tmp_path)
    debris = [folder / ".result.json.a1.tmp", folder / "checkpoints" / ".weights.pt.b2.tmp"]
    for path in debris:
        path.parent.mkdir(exist_ok=True)
        path.write_text("half of a file")
    run_cell(folder)
    assert not any(path.exists() for path in debris)


def part_of(cell: Cell, folder: Path, body: str) -> None:
    """Let the cell in `folder` import a part that runs `body` before every step."""
    part = folder / "part_of_mine.py"
    part.write_text(
        "import os, sys\nfrom lit_attn.tasks import base\n"
        "original = base.TaskModule.training_step\n"
        f"def step(*arguments):\n    {body}\n    return original(*arguments)\n"
        "base.TaskModule.training_step = step\n"
    )
    cell.model_copy(update={"parts": (part,)}).write(folder / "config.yaml")


@pytest.mark.process
def test_code_that_exits_is_a_failure(tmp_path: Path) -> None:
    cell = digits_cell(training={"max_steps": 1})
    folder = folder_of(cell, tmp_path)
    part_of(cell, folder, "sys.exit(0)")
    done = train_alone(folder)
    assert done.returncode == 1
    assert done.stderr.endswith(f"{folder}: the cell's code called sys.exit(0)\n")
    assert not (folder / "result.json").exists()


def test_a_forked_copy_of_training_writes_nothing(tmp_path: Path) -> None:
    console = Console(1, 1, "test/accuracy")
    progress = Progress(tmp_path / "progress.json", 1, console, HostClock())
    progress.on_train_batch_start(None, None, None, 0)  # type: ignore[arg-type]
    trainer = SimpleNamespace(accumulate_grad_batches=1, is_global_zero=True, global_step=1)
    if not (copy := os.fork()):
        with contextlib.suppress(BaseException):
            progress.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
        os._exit(0)
    _, status = os.waitpid(copy, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_code_that_changes_the_working_directory_does_not_move_the_records(
    tmp_path: Path,
) -> None:
    cell = digits_cell(training={"max_steps": 1})
    folder = folder_of(cell, tmp_path / "runs")
    part_of(cell, folder, "os.chdir('/')")
    relative = os.path.relpath(folder, tmp_path)
    path = os.pathsep.join(sys.path)
    done = run_python(tmp_path, "-m", "lit_attn.train", relative, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (folder / "result.json").exists()


def test_a_result_of_a_newer_version_is_not_trained_again(tmp_path: Path) -> None:
    cell = digits_cell()
    folder = folder_of(cell, tmp_path)
    (folder / "result.json").write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="newer version of lit_attn"):
        run_cell(folder)
    assert (folder / "result.json").exists()
