"""Run the tests against small mistakes in the package, and print which mistakes they find.

    PYTHONPATH=. python tests/mutations/run.py [AREA ...] [--texts] [--unchanged] [--most N]

mistakes.yaml lists the mistakes by area. Each is a text of the package and its replacement; the
text stands exactly once in lit_attn/, in whichever file, so that a mistake stays valid when code
moves to another file. An area has the arguments of pytest that should find its mistakes, and a
mistake can have its own. The tests run in a copy of the repository; with `--unchanged` also once
for each area without a mistake, where they must pass.

A mistake that is not found needs a test. A test that no mistake needs may be superfluous, so this
script also says whether a change of the tests loses anything: run it before and after.
`--texts` only checks that every text stands in the package. Exit code 0: every mistake was found.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mistakes.yaml")
COPIED = ["lit_attn", "tests", "experiments", "docs", "ablations.yaml", "pyproject.toml"]
COPIED += ["README.md", "AGENTS.md", "CHANGELOG.md"]
SECONDS = 600
"""Longest run of the tests of one mistake. A mistake that stops a program counts as found."""


class Mistake(NamedTuple):
    """A text of the package, its replacement, and the arguments of pytest that should find it."""

    area: str
    text: str
    replacement: str
    tests: list[str]

    @property
    def title(self) -> str:
        """Return the replaced line and its replacement in one line."""
        before = " ".join(self.text.split())
        after = " ".join(self.replacement.split())
        return f"{self.area}: {before}  ->  {after}"


def read_mistakes(areas: list[str]) -> list[Mistake]:
    """Return the mistakes of `areas`, or of all areas; each area begins with an empty one."""
    listed: dict[str, dict[str, Any]] = yaml.safe_load(LIST.read_text())
    unknown = set(areas) - set(listed)
    if unknown:
        sys.exit(f"unknown areas: {', '.join(sorted(unknown))}; known: {', '.join(listed)}")
    mistakes = []
    for area in areas or listed:
        tests = listed[area]["tests"].split("\n")
        mistakes.append(Mistake(area, "", "", _split_lines(tests)))
        for text, replacement, *selected in listed[area]["mistakes"]:
            chosen = selected if selected else _split_lines(tests)
            mistakes.append(Mistake(area, text, replacement, chosen))
    return mistakes


def _split_lines(lines: list[str]) -> list[str]:
    """Return the lines without the empty ones."""
    return [line for line in lines if line]


def find_files(mistakes: list[Mistake]) -> dict[str, Path]:
    """Return the file of lit_attn/ with each text; exit if a text does not stand in exactly one."""
    contents = {path: path.read_text() for path in sorted((ROOT / "lit_attn").rglob("*.py"))}
    files = {}
    problems = []
    for mistake in mistakes:
        places: list[Path] = []
        for path, content in contents.items():
            places += [path.relative_to(ROOT)] * content.count(mistake.text)
        if len(places) == 1:
            files[mistake.text] = places[0]
        else:
            names = ", ".join(map(str, places)) or "no file"
            problems.append(f"{mistake.title}\n    must stand once, and stands in {names}")
    if problems:
        sys.exit("mistakes.yaml:\n" + "\n".join(problems))
    return files


class Counted:
    """Plugin of pytest that counts the failures of each test function."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures[report.nodeid.partition("[")[0]] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures[report.nodeid] += 1


def run_pytest(copy: Path, mistake: Mistake, most: int, answer: Path) -> None:
    """Run the tests of a mistake in this process, and write the failures by test function."""
    os.setsid()
    os.chdir(copy)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = [str(copy)]
    os.environ["PYTHONPATH"] = str(copy)
    counted = Counted()
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", f"--maxfail={most}", "--tb=line"]
    # Plugins of pytest can be among the imports of `main`.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    pytest.main([*options, *mistake.tests], plugins=[counted])
    answer.write_text(json.dumps(counted.failures))


def run_tests(copy: Path, mistake: Mistake, most: int) -> dict[str, int] | None:
    """Return the failures by test function in a forked process, or None beyond SECONDS."""
    answer = copy / "failures.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            run_pytest(copy, mistake, most, answer)
        except BaseException:
            # This script has failed: pytest itself reports the exceptions of tests.
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            # A process that died before it answered did not survive the mistake.
            return json.loads(answer.read_text()) if answer.exists() else {"(process died)": 1}
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def try_mistake(copy: Path, mistake: Mistake, file: Path | None, most: int) -> bool:
    """Print the failures of the tests with a mistake in `file`; return True if all is well."""
    started = time.monotonic()
    path = None
    if file is not None:
        path = copy / file
        original = path.read_text()
        path.write_text(original.replace(mistake.text, mistake.replacement))
        forget_bytecode(path)
    failures = run_tests(copy, mistake, most)
    if path is not None:
        path.write_text(original)
        forget_bytecode(path)
    seconds = time.monotonic() - started
    if file is None:
        state = "passes" if failures == {} else f"FAILS WITHOUT A MISTAKE {failures}"
        print(f"{state:12} {seconds:5.0f} s  {mistake.area}: unchanged", flush=True)
        return failures == {}
    if failures is None:
        verdict = "found: stopped"
    elif failures:
        count = sum(failures.values())
        more = " or more" if count >= most else ""
        verdict = f"found by {count}{more}"
    else:
        verdict = "NOT FOUND"
    print(f"{verdict:12} {seconds:5.0f} s  {mistake.title}", flush=True)
    for test, number in (failures or {}).items():
        print(f"    {number:3} {test}", flush=True)
    return failures != {}


def forget_bytecode(path: Path) -> None:
    """Remove compiled code: a replacement of equal length in the same second would look equal."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def copy_repository(folder: Path) -> Path:
    """Copy what the tests read, and return the folder of the copy."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help="areas of mistakes.yaml")
    parser.add_argument("--texts", action="store_true", help="only look for the texts")
    parser.add_argument("--unchanged", action="store_true", help="run the tests as they are, too")
    parser.add_argument("--most", type=int, default=20, help="failures after which a run ends")
    chosen = parser.parse_args()
    mistakes = read_mistakes(chosen.areas)
    real = [mistake for mistake in mistakes if mistake.text]
    files = find_files(real)
    if chosen.texts:
        print(f"{len(real)} mistakes can be made")
        return 0
    # Forked processes share these imports; the package itself is imported with its mistake.
    import lightning  # noqa: F401
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    import timm  # noqa: F401

    if not chosen.unchanged:
        mistakes = real
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations.") as folder:
        copy = copy_repository(Path(folder))
        for mistake in mistakes:
            missed += not try_mistake(copy, mistake, files.get(mistake.text), chosen.most)
    print(f"{len(real)} mistakes, {missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
