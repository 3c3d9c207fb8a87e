"""Check the supported versions: `python .ci/check_versions.py [--lowest]`. Installs nothing.

pyproject.toml has the oldest version of each package, constraints.txt the newest that the tests
ran with, and README.md both, in one line. A test of the private names that this package uses runs
with the newest ones (lit_attn/private_names).

The index must serve the oldest versions of all direct dependencies, and they must fit together.
Versions of the index that are newer than constraints.txt are printed. An index that does not
answer fails no check: the output says that it was not asked.

`--lowest` prints the oldest versions as constraints of pip.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "torch": "PyTorch",
    "lightning": "Lightning",
    "timm": "timm",
    "transformers": "transformers",
    "onedl-mmsegmentation": "onedl-mmsegmentation",
}
"""Packages on whose details this one depends most, and their names in README.md."""
EXTRAS = (
    "completion",
    "datasets",
    "segmentation",
    "slurm",
    "text",
    "trackers",
    "transformers",
)
"""Extras of users. The package of `fla` needs a newer transformers than this one."""
SECONDS = 120
"""Longest wait for the index."""


def read_project() -> dict[str, list[str]]:
    """Return the requirements of the package (key "") and of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def list_lowest() -> dict[str, str]:
    """Return the oldest version of each direct dependency of users that has one."""
    requirements = read_project()
    lowest = {}
    for extra in ("", *EXTRAS):
        for requirement in requirements[extra]:
            match = re.match(r"([\w-]+)(?:\[\w+\])?\s*>=\s*([\d.]+)", requirement)
            if match:
                lowest[match[1]] = match[2]
    return lowest


def list_newest() -> dict[str, str]:
    """Return the version of each package in constraints.txt."""
    return read_pins((ROOT / "constraints.txt").read_text())


def read_pins(text: str) -> dict[str, str]:
    """Return the version of each package that has a line `name==version`."""
    pins = {}
    for line in text.splitlines():
        name, separator, version = line.partition("==")
        if separator:
            pins[name] = version
    return pins


def describe_ranges(lowest: dict[str, str], newest: dict[str, str]) -> str:
    """Return the sentence of README.md about versions."""
    ranges = []
    for name, title in PACKAGES.items():
        if lowest[name] == newest[name]:
            ranges.append(f"{title} {lowest[name]}")
        else:
            ranges.append(f"{title} {lowest[name]} to {newest[name]}")
    return f"Supported versions: {', '.join(ranges)}."


def resolve(constraints: list[str]) -> dict[str, str] | str:
    """Return the versions that an installer would choose, or the reason why it cannot."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", str(ROOT / "pyproject.toml")]
    for extra in EXTRAS:
        command += ["--extra", extra]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints))
        file.flush()
        command += ["--constraint", file.name]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"no answer within {SECONDS} seconds"
    if answer.returncode:
        return answer.stderr.strip()
    return read_pins(answer.stdout)


def check_lowest(lowest: dict[str, str]) -> bool:
    """Print if the index serves the oldest versions together. Return False if it does not."""
    resolved = resolve([f"{name}=={version}" for name, version in lowest.items()])
    if isinstance(resolved, dict):
        print("The index serves the oldest versions of all direct dependencies together.")
        return True
    if "No solution found" in resolved:
        print(f"pyproject.toml: the oldest versions cannot be installed together.\n{resolved}")
        return False
    print(f"The oldest versions were not looked up in the index: {resolved}")
    return True


def print_newer(newest: dict[str, str]) -> None:
    """Print the packages of which the index has a newer version than constraints.txt."""
    resolved = resolve([])
    if isinstance(resolved, str):
        print(f"The newest versions were not looked up in the index: {resolved}")
        return
    for name in PACKAGES:
        if resolved[name] != newest[name]:
            print(f"{name} {resolved[name]} of the index was not tried ({newest[name]} was).")


def main() -> int:
    lowest = list_lowest()
    if sys.argv[1:] == ["--lowest"]:
        for name, version in lowest.items():
            print(f"{name}=={version}")
        return 0
    newest = list_newest()
    sentence = describe_ranges(lowest, newest)
    readme = " ".join((ROOT / "README.md").read_text().split())
    if sentence not in readme:
        print(f"README.md: the sentence about versions should be:\n{sentence}")
        return 1
    print(sentence)
    print_newer(newest)
    return 0 if check_lowest(lowest) else 1


if __name__ == "__main__":
    sys.exit(main())
