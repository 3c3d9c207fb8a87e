"""The Dockerfile: its steps on this machine, and the image where Docker or Podman can build it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.paths import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = "lit_attn-test"


def read_steps() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    lines = [line for line in TEXT.replace("\\\n", " ").splitlines() if line.strip()]
    steps = [line.partition(" ") for line in lines if not line.startswith("#")]
    return [(name, arguments.strip()) for name, _, arguments in steps]


def arguments_of(name: str) -> list[str]:
    return [arguments for step, arguments in read_steps() if step == name]


def copy_context(folder: Path) -> None:
    """Make the steps COPY of the Dockerfile in a folder."""
    for arguments in arguments_of("COPY"):
        *names, target = arguments.split()
        for name in names:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / target, ignore=ignored)
            else:
                shutil.copy2(source, folder / target)


def find_builder() -> str:
    """Return the name of a program that can build images here, or ""."""
    for program in ("docker", "podman"):
        if shutil.which(program) is None:
            continue
        done = subprocess.run([program, "info"], capture_output=True, check=False)
        if done.returncode == 0:
            return program
    return ""


def test_the_image_copies_all_that_the_wheel_is_built_from() -> None:
    copied = {name for arguments in arguments_of("COPY") for name in arguments.split()[:-1]}
    project = SETTINGS["project"]
    wheel = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]
    built_from = {project["readme"], *project["license-files"], *wheel["packages"]}
    assert copied == built_from | {*wheel["force-include"], "pyproject.toml", "constraints.txt"}
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_installs_the_package_with_the_tested_versions() -> None:
    """The versions are those of README's command for developers."""
    (install,) = [words for words in arguments_of("RUN") if words.startswith("pip install")]
    words = shlex.split(install)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (constraints,) = re.findall(r'pip install -e "\.\[dev\]" (-c \S+)', readme)
    assert " ".join(words[-2:]) == constraints
    (package,) = [word for word in words if word.startswith(".")]
    extras = re.fullmatch(r"\.\[(.*)\]", package)
    assert extras is not None
    # `text` contains `datasets`. The other ones are for developers.
    left_out = {"datasets", "dev", "docs", "harness"}
    optional = SETTINGS["project"]["optional-dependencies"].keys()
    assert set(extras[1].split(",")) == optional - left_out
    assert arguments_of("ENTRYPOINT") == ['["lit-attn"]']
    assert "lit-attn" in SETTINGS["project"]["scripts"]


def test_the_documentation_has_the_commands_of_the_dockerfile() -> None:
    commands = re.findall(r"^#   (docker .*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for command in commands:
        assert f"    {command}\n" in page


@pytest.mark.slow
def test_the_package_is_built_from_the_files_of_the_image_alone(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    context = tmp_path / "context"
    wheels = tmp_path / "wheels"
    context.mkdir()
    copy_context(context)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "--wheel-dir", str(wheels)], check=True, cwd=context)
    assert len(list(wheels.glob("lit_attn-*.whl"))) == 1


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(3600)
def test_the_image_runs_a_study(tmp_path: Path) -> None:
    builder = find_builder()
    if not builder:
        pytest.skip("neither Docker nor Podman can build images here")
    subprocess.run([builder, "build", "-t", IMAGE, "."], check=True, cwd=ROOT)
    # The command of docs/running.md without GPUs.
    user = f"{os.getuid()}:{os.getgid()}"
    run = [builder, "run", "--rm", "--init", "--user", user, "--shm-size", "1g"]
    command = [*run, "-v", f"{tmp_path}:/work", IMAGE, "run", "digits", "--smoke"]
    subprocess.run(command, check=True)
    assert list(tmp_path.glob("runs/smoke/digits/*/*/result.json"))
