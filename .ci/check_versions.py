"""Check that the supported versions are the same wherever they are written. Installs nothing.

pyproject.toml has the oldest version of each package, constraints.txt the newest that the tests
ran with, and README.md both, in one line. A test of the private names that this package uses runs
with the newest ones (lit_attn/private_names).
"""

import re
import sys
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


def read_oldest(name: str) -> str:
    """Return the oldest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    for requirement in requirements:
        match = re.match(rf"{name}\s*>=\s*([\d.]+)", requirement)
        if match:
            return match[1]
    sys.exit(f"pyproject.toml: no oldest version of {name}")


def read_newest(name: str) -> str:
    """Return the version in constraints.txt."""
    match = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f"constraints.txt: no version of {name}")
    return match[1]


def describe_ranges() -> str:
    """Return the sentence of README.md about versions."""
    ranges = []
    for name, title in PACKAGES.items():
        oldest = read_oldest(name)
        newest = read_newest(name)
        ranges.append(f"{title} {oldest}" if oldest == newest else f"{title} {oldest} to {newest}")
    return f"Supported versions: {', '.join(ranges)}."


def main() -> int:
    sentence = describe_ranges()
    readme = " ".join((ROOT / "README.md").read_text().split())
    if sentence not in readme:
        print(f"README.md: the sentence about versions should be:\n{sentence}")
        return 1
    print(sentence)
    return 0


if __name__ == "__main__":
    sys.exit(main())
