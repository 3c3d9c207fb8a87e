"""The files that a release publishes: they are accepted, and install from an index."""

import functools
import http.server
import os
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement


def build(folder: Path, target: str) -> Path:
    """Return the wheel or sdist of the checkout, built in `folder` without a network."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (file,) = folder.glob("lit_attn-*.whl" if target == "wheel" else "lit_attn-*.tar.gz")
    return file


def check(file: Path, *command: str) -> None:
    """Run a checker of published files on `file`."""
    pytest.importorskip(command[0])
    done = subprocess.run(
        [sys.executable, "-m", *command, str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_sdist_is_accepted_and_has_no_tests(tmp_path: Path) -> None:
    sdist = build(tmp_path, "sdist")
    check(sdist, "twine", "check", "--strict")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    shipped = {"ablations.yaml", "lit_attn/hub/model_card.md", "experiments/digits_vit.yaml"}
    assert shipped <= set(names)
    assert not any(name.startswith(("tests/", "reports/")) for name in names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"), "wheel")


@pytest.mark.slow
def test_the_wheel_is_accepted_and_has_the_shipped_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "lit_attn/shipped/ablations.yaml" in names
    assert "lit_attn/starter/ablations.yaml" in names
    assert "lit_attn/py.typed" in names
    assert not any(name.startswith(("tests/", "reports/")) for name in names)
    check(wheel, "twine", "check", "--strict")
    check(wheel, "check_wheel_contents")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server of the files of a folder that prints nothing."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def index(wheel: Path, tmp_path: Path) -> Iterator[str]:
    """Address of a package index on this machine that holds the wheel and nothing else."""
    project = tmp_path / "index" / "lit-attn"
    project.mkdir(parents=True)
    (project / wheel.name).symlink_to(wheel)
    (project / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    handler = functools.partial(Quiet, directory=str(project.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def collect_dependencies() -> dict[str, metadata.Distribution]:
    """Return the installed packages that the project needs without extras, by name."""
    needed: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(text) for text in metadata.requires("lit_attn") or ()]
    visited: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        for extra in extras:
            if (requirement.name, extra) in visited or not applies(requirement, ""):
                continue
            visited.add((requirement.name, extra))
            package = metadata.distribution(requirement.name)
            needed[requirement.name] = package
            further = [Requirement(text) for text in package.requires or ()]
            waiting += [without_extra(entry) for entry in further if applies(entry, extra)]
    return needed


def applies(requirement: Requirement, extra: str) -> bool:
    """Return True if a package with `extra` needs the requirement on this machine."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def without_extra(requirement: Requirement) -> Requirement:
    """Return a requirement that applies without its condition."""
    requirement.marker = None
    return requirement


def link_packages(packages: dict[str, metadata.Distribution], library: Path) -> None:
    """Link the files of installed packages into the folder of packages of another environment."""
    for package in packages.values():
        for file in package.files or ():
            # Commands of a package are not needed.
            if ".." in file.parts:
                continue
            link = library / file
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(file))).resolve())


@pytest.mark.slow
def test_the_package_of_an_index_trains_with_its_required_dependencies_alone(
    index: str, tmp_path: Path
) -> None:
    """A package that only an extra names is absent, so an import of it fails."""
    home = tmp_path / "environment"
    work = tmp_path / "work"
    work.mkdir()
    venv.create(home, with_pip=False)
    (library,) = home.glob("lib/python*/site-packages")
    dependencies = collect_dependencies()
    assert "torch" in dependencies
    assert "transformers" not in dependencies
    link_packages(dependencies, library)
    install = [
        "install",
        "--quiet",
        "--isolated",
        "--no-cache-dir",
        "--index-url",
        index,
        "lit-attn",
    ]
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), *install]
    installed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def lit_attn(*words: str) -> str:
        done = subprocess.run(
            [str(home / "bin" / "lit-attn"), *words],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(library) in lit_attn("list", "studies")
    assert "belief2-cifar100: " in lit_attn("run", "belief2-cifar100", "--dry-run")
    lit_attn("init")
    assert "12 missing" in lit_attn("run", "--dry-run")
    lit_attn("run", "first", "--smoke", "--seeds", "1")
    lit_attn("report", "runs/smoke")
    assert (work / "reports" / "index.html").exists()
    assert "4 done" in lit_attn("status", "runs/smoke")
