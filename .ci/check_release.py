"""Check that a tag can be released: `python .ci/check_release.py v0.2.0`.

The tag is the package's version, and CHANGELOG.md has this version with a date and nothing that is
unreleased.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(tag: str) -> int:
    """Return 0, or 1 after one line for each reason against the release."""
    version = read_version(ROOT / "lit_attn" / "__init__.py")
    problems = find_problems(tag, version, (ROOT / "CHANGELOG.md").read_text())
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_version(file: Path) -> str:
    """Return `__version__` without importing the package, whose dependencies may be absent."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__version__":
            return str(ast.literal_eval(statement.value))
    raise ValueError(f"{file}: has no __version__")


def find_problems(tag: str, version: str, changelog: str) -> list[str]:
    """Return the reasons against a release of `version` by `tag`."""
    problems = []
    if tag != f"v{version}":
        problems.append(f"{tag}: the package has version {version}; tag v{version}, or change it")
    titles = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    if "Unreleased" in titles:
        problems.append(f"CHANGELOG.md: 'Unreleased' becomes '{version}, DATE' at a release")
    dated = rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d"
    if not any(re.fullmatch(dated, title) for title in titles):
        problems.append(f"CHANGELOG.md: has no section '{version}, DATE', as 2026-01-31")
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
