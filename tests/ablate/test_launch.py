"""The fork server: its start and its imports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from helpers import studies
from helpers.commands import run_new_python
from helpers.paths import ROOT
from helpers.runs import TIMEOUT, count_runs, make_body, start_interpreter, wait_until
from helpers.training_cells import digits_cell, folder_of, scenes_cell, text_cell

from lit_attn import train
from lit_attn.ablate import dry_run, launch, step_times
from lit_attn.ablate.commands import run
from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.schema.errors import command
from lit_attn.schema.mistakes import EXIT_CODE
from lit_attn.training import first_step

# Imports what the server imports, and prints what each cell imports in addition.
CODE = """\
import importlib, json, sys
from pathlib import Path
from lit_attn.ablate.launch import TRAINING
from lit_attn.train import run_cell
for module in TRAINING:
    importlib.import_module(module)
loaded, added = set(sys.modules), []
for folder in sys.argv[1:]:
    run_cell(Path(folder), smoke=True)
    added.append(sorted(set(sys.modules) - loaded))
    loaded |= set(sys.modules)
print(json.dumps(added))
"""


def test_the_garbage_collector_of_a_cell_leaves_imported_objects_alone(tmp_path: Path) -> None:
    code = (
        "import gc, multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "server = multiprocessing.get_context('forkserver')\n"
        "server.set_forkserver_preload(['lit_attn.cells.fork_server', 'pydantic'])\n"
        "with ProcessPoolExecutor(1, server) as pool:\n"
        "    count = pool.submit(gc.get_freeze_count).result()\n"
        "    print(pool.submit(gc.isenabled).result(), count > 10_000)\n"
    )
    finished = run_new_python(tmp_path, "-c", code)
    assert finished.stdout == "True True\n", finished.stderr


@pytest.mark.parametrize("target", [run.TARGET, step_times.TARGET, dry_run.TIMING_TARGET])
def test_a_measurement_starts_the_server_that_the_cells_need(target: str) -> None:
    """Else, every cell after a measurement for `match: time` imports torch itself, for seconds."""
    module = target.partition(":")[0]
    assert set(launch.TRAINING) <= set(launch.list_preloads(module))


@pytest.mark.process
@pytest.mark.skipif(find_spec("mmseg") is None, reason="no mmsegmentation")
def test_the_server_imports_the_modules_of_every_task(tmp_path: Path) -> None:
    """Cells import no further modules of this project or of packages, except mmsegmentation."""
    looking = {
        "diagnostics": {"kinds": ["residual", "rank", "maps", "heads"]},
        "average": {"decay": 0.9},
    }
    cells = {
        "classification": digits_cell(training=looking),
        "language": text_cell(),
        "segmentation": scenes_cell(tmp_path / "scenes"),
    }
    folders = [str(folder_of(cell, tmp_path / name)) for name, cell in cells.items()]
    done = run_new_python(tmp_path, "-c", CODE, *folders)
    assert done.returncode == 0, done.stderr
    loaded = dict(zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True))
    ours = {
        task: {name for name in modules if name.startswith("lit_attn")}
        for task, modules in loaded.items()
    }
    # Modules that are built from parts of mmsegmentation are imported with it.
    del ours["segmentation"]
    assert not any(ours.values()), ours
    for task in ours:
        packages = {name for name in loaded[task] if "." not in name}
        assert packages <= sys.stdlib_module_names, task
    # Cells of other tasks do not pay for mmsegmentation.
    assert "mmseg" in loaded["segmentation"]


# A target whose import lasts until there is a file `go`, and which can kill the server.
TARGET = """\
import os, signal, time
from pathlib import Path
from helpers.fake_cells import run_cell
begun = Path("importing")
if Path("deadly").exists() and not begun.exists():
    begun.touch()
    os.kill(os.getpid(), signal.SIGKILL)
begun.touch()
while not Path("go").exists():
    time.sleep(0.01)
"""
SCRIPT = """\
import sys
import time
from helpers import fake_cells
if __name__ == "__main__":
    fake_cells.TARGET = "slow_target:run_cell"
    sys.exit(fake_cells._main())
"""


def start(path: Path) -> "subprocess.Popen[str]":
    """Start a run of two cells in a session of its own, as in a terminal."""
    studies.write(path, make_body("ok"))
    (path / "slow_target.py").write_text(TARGET)
    (path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    return start_interpreter(path, ("script.py", "ablations.yaml", "--jobs", "1"), environment)


def server_of(process: "subprocess.Popen[str]") -> bool:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        # Another child of the command may have ended.
        with contextlib.suppress(OSError):
            if b"multiprocessing.forkserver" in Path(f"/proc/{child}/cmdline").read_bytes():
                return True
    return False


def test_an_interrupt_during_the_check_before_a_submission_is_one_line(tmp_path: Path) -> None:
    """The process that checks the models does not see the interrupt, so it prints no traceback."""
    studies.write(tmp_path, make_body("ok"))
    code = (
        "import sys; from lit_attn.ablate import launch; from lit_attn.ablate.plan import expand\n"
        "from lit_attn.config.study import read_studies; from pathlib import Path\n"
        "from lit_attn.schema.errors import command\n"
        "def check():\n"
        "    study = read_studies(Path('ablations.yaml'))['tiny']\n"
        "    matrix = expand(study, Path('runs'))\n"
        "    launcher = launch.Launcher('lit_attn.train:run_cell')\n"
        "    launcher.require_cells([matrix], matrix.jobs, None, is_local=False)\n"
        "    return 0\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(command(check)())\n"
    )
    (tmp_path / "check.py").write_text(code)
    with subprocess.Popen(
        [sys.executable, "check.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # The resource tracker, and the process that checks.
        wait_until(lambda: len(children.read_text().split()) == 2)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert (output, errors) == ("checking the models and data of 1 variant\n", "\n")


@pytest.mark.process
@pytest.mark.parametrize("when", ["its first moment", "its imports"])
def test_an_interrupt_during_the_start_of_the_server_drains(tmp_path: Path, when: str) -> None:
    with start(tmp_path) as process:
        wait_until(
            (tmp_path / "importing").exists if when == "its imports" else lambda: server_of(process)
        )
        os.killpg(process.pid, signal.SIGINT)
        # The runner has received the signal before it can start the cell.
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "starting no more" in output
    # The cell that was about to start has finished.
    assert count_runs(tmp_path) == {"ok/0": 1}, output


@pytest.mark.process
def test_a_server_killed_while_it_imports_is_replaced(tmp_path: Path) -> None:
    for name in ("deadly", "go"):
        (tmp_path / name).touch()
    with start(tmp_path) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    assert "after killed: could not be started: the fork server has ended" in output
    assert count_runs(tmp_path) == {"ok/0": 1, "ok/1": 1}


def test_a_mistake_in_the_check_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the check has no output, so nobody would see its traceback."""
    monkeypatch.setattr(train, "die_with_parent", lambda: None)
    monkeypatch.setattr(train, "redirect_output", lambda path: None)
    monkeypatch.delattr(first_step, "LoadedData")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sender = MagicMock()
    train.check_cells([], sender, True, [], {}, gpu=None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    train.check_cells([], sender, True, [], {}, gpu="7")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    (mistake, warnings) = sender.send.call_args.args[0]
    assert mistake is None
    assert warnings[0].startswith("the models and data were not checked: ")
    assert "LoadedData" in warnings[0]


def test_a_mistake_of_lit_attn_in_a_step_is_no_wrong_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with the exit code of a mistake of the program."""
    studies.write(tmp_path, make_body("ok"))
    matrix = expand(read_studies(tmp_path / "ablations.yaml")["tiny"], tmp_path / "runs")
    monkeypatch.setattr(launch, "write_line", lambda text: None)
    launcher = launch.Launcher("lit_attn.train:run_cell")

    def run() -> int:
        launcher.checked.clear()
        launcher.require_cells([matrix], matrix.jobs, None, is_local=False)
        return 0

    for is_own, code in ((False, 2), (True, EXIT_CODE)):
        end = train.CheckEnd((0, "the first step: wrong", "", is_own), [])
        monkeypatch.setattr(launch, "check_variants", MagicMock(return_value=end))
        assert command(run)() == code
