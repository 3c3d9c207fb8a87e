"""Snapshots of the code for jobs that wait in a queue (tests/slurm/test_snapshots.py runs jobs)."""

import fcntl
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from helpers import studies
from helpers.commands import run_new_python
from helpers.runs import make_body

import lit_attn
from lit_attn.ablate.job import Job
from lit_attn.ablate.outcomes import Summary
from lit_attn.ablate.plan import expand
from lit_attn.ablate.runner import GRACE
from lit_attn.ablate.slurm import job as job_module
from lit_attn.ablate.slurm import submit
from lit_attn.ablate.slurm.job import SlurmCell
from lit_attn.ablate.slurm.limits import Cluster
from lit_attn.ablate.slurm.queue import NAME, ListedJob
from lit_attn.ablate.slurm.submit import Array
from lit_attn.ablate.snapshot import activation_lines, remove_unneeded, take_snapshot
from lit_attn.config.cell import Cell
from lit_attn.config.slurm import WARNING
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import locate_copy

PACKAGE = Path(lit_attn.__file__).parent


def write_parts(folder: Path) -> Path:
    """Write a plug-in with neighbours: a module, a package, data, a link and a cache."""
    (folder / "layers").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "__pycache__").mkdir()
    (folder / "mine.py").write_text("import neighbour\nfrom layers import inner\n")
    (folder / "neighbour.py").write_text("VALUE = 1\n")
    (folder / "layers" / "inner.py").write_text("VALUE = 2\n")
    (folder / "data" / "values.txt").write_text("3")
    (folder / "loop").symlink_to(folder)
    (folder / "broken.py").symlink_to(folder / "absent.py")
    return folder / "mine.py"


def test_equal_code_has_one_snapshot(tmp_path: Path) -> None:
    part = write_parts(tmp_path / "study")
    first = take_snapshot(tmp_path / "runs", [part])
    assert take_snapshot(tmp_path / "runs", [part]) == first
    (tmp_path / "study" / "layers" / "inner.py").write_text("VALUE = 20\n")
    second = take_snapshot(tmp_path / "runs", [part])
    assert second != first
    assert {path for path in (tmp_path / "runs" / ".code").iterdir() if path.is_dir()} == {
        first,
        second,
    }
    old, new = (
        locate_copy(part, snapshot).parent / "layers/inner.py" for snapshot in (first, second)
    )
    assert (old.read_text(), new.read_text()) == ("VALUE = 2\n", "VALUE = 20\n")


def test_a_snapshot_copies_code_and_links_data(tmp_path: Path) -> None:
    part = write_parts(tmp_path / "study")
    snapshot = take_snapshot(tmp_path / "runs", [part])
    copy = locate_copy(part, snapshot).parent
    links = {path.name for path in copy.iterdir() if path.is_symlink()}
    assert links == {"data", "loop", "broken.py"}
    assert {path.name for path in copy.iterdir()} - links == {"mine.py", "neighbour.py", "layers"}
    assert (copy / "data" / "values.txt").read_text() == "3"
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file()}
    package = snapshot / "package" / "lit_attn"
    copied = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    assert copied == {path for path in files if "__pycache__" not in path.parts}


def test_python_imports_the_snapshot_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory has newer code of the package, the plug-in and its neighbour."""
    study = tmp_path / "study folder"
    part = write_parts(study)
    (study / "local.py").write_text("")
    snapshot = take_snapshot(tmp_path / "runs", [part])
    monkeypatch.chdir(study)
    lines = activation_lines(snapshot)
    (study / "lit_attn").mkdir()
    for path in (study / "lit_attn" / "__init__.py", part, study / "neighbour.py"):
        path.write_text("raise RuntimeError('newer code')")
    (study / "check.py").write_text(
        "import sys, lit_attn, local; from pathlib import Path\n"
        "from lit_attn.schema import plugins\n"
        f"part = Path({str(part)!r}); plugins.load_parts([part])\n"
        "modules = [lit_attn, sys.modules['mine'], sys.modules['neighbour'], local]\n"
        "print(*(module.__file__ for module in modules), part in plugins.FILE_HASHES, sep='\\n')"
    )
    script = "\n".join([*lines, f"{sys.executable} -m check"])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for search_path in ({}, {"PYTHONPATH": f"{study}:{PACKAGE.parent}"}):
        done = subprocess.run(
            ["bash", "-c", script],
            env=environment | search_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        copy = locate_copy(part, snapshot)
        assert done.stdout.splitlines() == [
            str(snapshot / "package" / "lit_attn" / "__init__.py"),
            str(copy),
            str(copy.with_name("neighbour.py")),
            str(study / "local.py"),
            "True",
        ]


def write_batch(out: Path, name: str, snapshot: str | None, cluster: str = "here") -> None:
    batch = out / "tiny" / ".slurm" / name
    batch.mkdir(parents=True)
    if snapshot is not None:
        (batch / "snapshot.txt").write_text(f"{snapshot}\n{cluster}")


def list_snapshots(out: Path) -> list[str]:
    return sorted(path.name for path in (out / ".code").iterdir() if path.is_dir())


def test_snapshots_that_no_job_needs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / ".code" / name / "package").mkdir(parents=True)
        write_batch(tmp_path, f"batch-{name}", name)
    # A submission that was terminated.
    (tmp_path / ".code" / "tmp-of-a-copy" / "code").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "values.txt").touch()
    (tmp_path / ".code" / "b" / "data").symlink_to(tmp_path / "data")
    remove_unneeded(tmp_path, {"batch-a", "batch-c", "of another folder"}, "here")
    assert list_snapshots(tmp_path) == ["a", "c"]
    assert (tmp_path / "data" / "values.txt").exists()
    # A batch of an older version does not name its snapshot.
    write_batch(tmp_path, "old", None)
    with pytest.raises(FileNotFoundError):
        remove_unneeded(tmp_path, {"old"}, "here")
    assert list_snapshots(tmp_path) == ["a", "c"]
    # The jobs of another user cannot be listed.
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "tiny" / ".slurm" / "old").rmdir()
    remove_unneeded(tmp_path, set(), "here")
    assert list_snapshots(tmp_path) == ["a", "c"]
    monkeypatch.undo()
    remove_unneeded(tmp_path, set(), "here")
    assert list_snapshots(tmp_path) == []


def test_a_snapshot_of_another_cluster_is_not_removed(tmp_path: Path) -> None:
    """The queue of the other cluster is not visible from this one, which may share its folder."""
    for name, cluster in (("a", "here"), ("b", "there"), ("c", "here")):
        (tmp_path / ".code" / name).mkdir(parents=True)
        write_batch(tmp_path, f"batch-{name}", name, cluster)
    write_batch(tmp_path, "batch-both", "c", "there")
    remove_unneeded(tmp_path, set(), "here")
    assert list_snapshots(tmp_path) == ["b", "c"]
    # A batch of an older version does not name its cluster.
    (tmp_path / "tiny" / ".slurm" / "batch-c" / "snapshot.txt").write_text("c")
    remove_unneeded(tmp_path, set(), "there")
    assert list_snapshots(tmp_path) == ["c"]


def test_the_store_is_locked_until_all_jobs_are_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another submission waits, so it cannot remove the snapshot of jobs that have no id yet."""
    matrix = expand(studies.study(tmp_path, make_body("ok", "ok-2")), tmp_path / "runs")
    events = []

    def is_locked() -> bool:
        with (tmp_path / "runs" / ".code" / ".code.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def submit_all(arrays: list[Array], *arguments: object) -> None:
        events.append(("submit", len(arrays[0].jobs), is_locked()))
        write_batch(tmp_path / "runs", "batch", list_snapshots(tmp_path / "runs")[-1])

    def list_jobs() -> list[ListedJob]:
        events.append(("list", 0, is_locked()))
        return [ListedJob("0", "1_0", "PENDING", NAME + "batch")]

    (tmp_path / "runs" / ".code" / "0000").mkdir(parents=True)
    monkeypatch.setattr(submit, "_submit_all", submit_all)
    monkeypatch.setattr(submit, "list_jobs", list_jobs)
    monkeypatch.setattr(submit.limits, "read_cluster", lambda: Cluster("here", 1001, None))
    count = submit.submit_missing([matrix], matrix.jobs, MagicMock(), None)
    assert count == len(matrix.jobs)
    assert events == [("submit", len(matrix.jobs), True), ("list", 0, True)]
    assert not is_locked()
    assert list_snapshots(tmp_path / "runs") != []
    assert "0000" not in list_snapshots(tmp_path / "runs")


def test_a_snapshot_that_cannot_be_written_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"^--launcher slurm: the code cannot be copied: .*runs"):
        take_snapshot(tmp_path / "runs", [])


def test_a_snapshot_of_a_home_folder_contains_no_secrets(tmp_path: Path) -> None:
    """Other Python files and hidden entries of the folder are neither copied nor linked."""
    home = tmp_path / "home"
    part = write_parts(home)
    secret = "hf_secret"
    for name in ("secrets.py", "tool/settings.py", ".env", ".ssh/id", ".hidden.py", "layers/.env"):
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"KEY = '{secret}'\n")
    snapshot = take_snapshot(tmp_path / "runs", [part])
    copy = locate_copy(part, snapshot).parent
    names = {path.name for path in copy.iterdir()}
    assert names == {"mine.py", "neighbour.py", "layers", "data", "loop", "broken.py", "tool"}
    assert (copy / "tool").is_symlink()
    copied = [path for path in snapshot.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in copied if secret in path.read_text(errors="replace")] == []
    assert {path.name for path in (copy / "layers").iterdir()} == {"inner.py"}


def test_modules_that_are_imported_late_are_copied(tmp_path: Path) -> None:
    """Inside a function, by a name in a string, through a neighbour, and from a package."""
    files = {
        "mine.py": "def build():\n    import late\n    return load('by-name:make')\n",
        "late.py": "from package.inner import value\n",
        "by-name.py": "import importlib\nimportlib.import_module('named')\n",
        "named.py": "",
        "package/inner.py": "import beside\n",
        "package/unused.py": "",
        "beside.py": "not python (",
        "unused.py": "import also_unused\n",
        "also_unused.py": "",
    }
    for name, content in files.items():
        path = tmp_path / "study" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    snapshot = take_snapshot(tmp_path / "runs", [tmp_path / "study" / "mine.py"])
    copy = locate_copy(tmp_path / "study" / "mine.py", snapshot).parent
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*.py")}
    assert copied == files.keys() - {"unused.py", "also_unused.py"}


def test_a_job_that_starts_its_cell_imports_no_pytorch(tmp_path: Path) -> None:
    """The process of the cell imports it, which takes seconds and hundreds of megabytes."""
    (job, *_) = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs").jobs
    cell = SlurmCell("lit_attn.train:run_cell", False, 1.0, job, nodes=1)
    (tmp_path / "cell.pickle").write_bytes(pickle.dumps(cell))
    code = (
        "import pickle, sys\n"
        "cell = pickle.loads(open('cell.pickle', 'rb').read())\n"
        "cell.job.write_config()\n"
        "sys.exit(f'{cell.job.state()}, torch: {\"torch\" in sys.modules}')"
    )
    done = run_new_python(tmp_path, "-c", code)
    assert done.stderr == "missing, torch: False\n"
    assert Cell.read(job.folder / "config.yaml") == job.cell


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_job_near_its_time_limit_leaves_its_cell_most_of_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_progress: bool
) -> None:
    """SLURM warns 120 s before the limit; a cell that is told to stop has 15 s otherwise.

    A job without a step is not queued again: it would end before its first step each time.
    """
    graces: list[float] = []
    requeues: list[int] = []

    class Stopped:
        """Runner that the job's warning stops."""

        def __init__(self, *_: object) -> None:
            self.grace = GRACE

        def run(self, jobs: list[Job]) -> Summary:
            graces.append(self.grace)
            previous = signal.signal(signal.SIGTERM, lambda *_: graces.append(self.grace))
            signal.raise_signal(signal.SIGUSR2)
            signal.signal(signal.SIGTERM, previous)
            if has_progress:
                (jobs[0].folder / "progress.json").write_text('{"step": 1, "total": 2}')
            return Summary()

    (job, *_) = expand(studies.study(tmp_path, make_body("ok")), tmp_path / "runs").jobs
    job.write_config()
    monkeypatch.setattr(job_module, "Runner", Stopped)
    monkeypatch.setattr(job_module, "start_server", lambda: None)
    previous = signal.signal(signal.SIGUSR2, lambda number, _: requeues.append(number))
    try:
        reason = "stopped before it began" if has_progress else "before its first step; increase"
        with pytest.raises(RuntimeError, match=reason):
            SlurmCell("", False, 1.0, job, nodes=1)()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert graces == [GRACE, job_module.SAVING]
    assert GRACE < 60 < job_module.SAVING < WARNING
    assert requeues == ([signal.SIGUSR2] if has_progress else [])
