"""Run the tests against mistakes drawn from the package, and print the share that they find.

    PYTHONPATH=. python tests/mutations/run.py [AREA ...] [--number N] [--seed N] [--out FILE]

draw.py has the areas, and draws the mistakes. The tests run in a copy of the repository, once
without a mistake, where they must pass.

Some mistakes change nothing that a program could see, so a share below 1 is no fault by itself.
Compare the shares of two states of the tests with the same seed: a change of the tests that lowers
the share of an area loses something.
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

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from draw import AREAS, Area, Mistake, draw_mistakes, list_files

ROOT = Path(__file__).resolve().parents[2]
COPIED = ["lit_attn", "tests", "experiments", "docs", "reports", "ablations.yaml", "pyproject.toml"]
COPIED += ["README.md", "AGENTS.md", "CHANGELOG.md", "LOG.md"]
SECONDS = 900
"""Longest run of the tests of one mistake. A mistake that stops a program counts as found."""


def choose_areas(names: list[str]) -> dict[str, Area]:
    """Return the areas of `names`, or all of them; exit if a name is unknown."""
    unknown = set(names) - set(AREAS)
    if unknown:
        sys.exit(f"unknown areas: {', '.join(sorted(unknown))}; known: {', '.join(AREAS)}")
    return {name: AREAS[name] for name in names or AREAS}


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


def run_pytest(copy: Path, tests: list[str], answer: Path) -> None:
    """Run the tests of an area in this process, and write the failures by test function."""
    os.setsid()
    os.chdir(copy)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path[:0] = [str(copy)]
    os.environ["PYTHONPATH"] = str(copy)
    counted = Counted()
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "--maxfail=1", "--tb=line"]
    # Plugins of pytest can be among the imports of `main`.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.ExitCode(pytest.main([*options, *tests], plugins=[counted]))
    if code is not pytest.ExitCode.OK and not counted.failures:
        # No test has run: a wrong option, a path that is gone, or no test of this name.
        counted.failures[f"({code.name})"] += 1
    answer.write_text(json.dumps(counted.failures))


def run_tests(copy: Path, tests: list[str]) -> dict[str, int] | None:
    """Return the failures by test function in a forked process, or None beyond SECONDS."""
    answer = copy / "failures.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            run_pytest(copy, tests, answer)
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


def try_mistake(copy: Path, mistake: Mistake, tests: list[str]) -> str:
    """Return the test that finds a mistake, or an empty text, and print it."""
    started = time.monotonic()
    path = copy / mistake.file
    original = path.read_text()
    path.write_text(mistake.apply(original))
    forget_bytecode(path)
    failures = run_tests(copy, tests)
    path.write_text(original)
    forget_bytecode(path)
    finder = "(stopped)" if failures is None else next(iter(failures), "")
    seconds = time.monotonic() - started
    verdict = f"found by {finder}" if finder else "NOT FOUND"
    print(f"{seconds:5.0f} s  {mistake.title}\n         {verdict}", flush=True)
    return finder


def require_passing(copy: Path, area: str, tests: list[str]) -> None:
    """Exit if the tests of an area fail without a mistake."""
    failures = run_tests(copy, tests)
    if failures != {}:
        log = (copy / "log.txt").read_text()[-2000:]
        sys.exit(f"{area}: the tests fail without a mistake: {failures}\n{log}")


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
    parser.add_argument("areas", nargs="*", metavar="AREA", help="areas of draw.py")
    parser.add_argument("--number", type=int, default=20, help="mistakes of each area")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--out", type=Path, help="write every mistake and what found it as JSON")
    chosen = parser.parse_args()
    areas = choose_areas(chosen.areas)
    # Forked processes share these imports; the package itself is imported with its mistake.
    import lightning  # noqa: F401
    import pandas  # noqa: F401
    import scipy.stats  # noqa: F401
    import timm  # noqa: F401

    record: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="mutations.") as folder:
        copy = copy_repository(Path(folder))
        for name, area in areas.items():
            require_passing(copy, name, area.tests)
            files = list_files(area, ROOT)
            finders = {}
            for mistake in draw_mistakes(files, ROOT, chosen.number, chosen.seed):
                finders[mistake.title] = try_mistake(copy, mistake, area.tests)
            record[name] = finders
            print(f"{name}: {sum(map(bool, finders.values()))} of {len(finders)} found", flush=True)
            if chosen.out is not None:
                chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
