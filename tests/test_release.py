"""The workflow of a release, and the check of its tag."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

import lit_attn
from lit_attn.schema.yaml_text import parse_plain

CHECK = ROOT / ".ci" / "check_release.py"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"


def run_check(folder: Path, tag: str, changelog: str) -> subprocess.CompletedProcess[str]:
    """Check a tag in a checkout of its own with version 1.2.0 and this changelog."""
    (folder / ".ci").mkdir()
    (folder / ".ci" / "check_release.py").write_text(CHECK.read_text())
    (folder / "lit_attn").mkdir()
    # The package cannot be imported before its dependencies are installed.
    (folder / "lit_attn" / "__init__.py").write_text('import absent\n\n__version__ = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    command = [sys.executable, str(folder / ".ci" / "check_release.py"), tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_tag_of_a_dated_version_can_be_released(tmp_path: Path) -> None:
    done = run_check(tmp_path, "v1.2.0", "# Changelog\n\n## 1.2.0, 2026-11-26\n\n## 1.1.0, 2025\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("tag", "changelog", "problem"),
    [
        ("v1.3.0", "## 1.2.0, 2026-11-26\n", "v1.3.0: the package has version 1.2.0; tag v1.2.0"),
        ("1.2.0", "## 1.2.0, 2026-11-26\n", "1.2.0: the package has version 1.2.0; tag v1.2.0"),
        ("v1.2.0", "## Unreleased\n\n## 1.2.0, 2026-11-26\n", "'Unreleased' becomes '1.2.0, DATE'"),
        ("v1.2.0", "## 1.2.0\n", "CHANGELOG.md: has no section '1.2.0, DATE'"),
        ("v1.2.0", "## 11.2.0, 2026-11-26\n", "CHANGELOG.md: has no section '1.2.0, DATE'"),
    ],
)
def test_another_tag_is_refused_in_one_line(
    tag: str, changelog: str, problem: str, tmp_path: Path
) -> None:
    done = run_check(tmp_path, tag, changelog)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_changelog_has_the_version_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(lit_attn.__version__)}, \d{{4}}-\d\d-\d\d$", text, re.M)


def test_nothing_is_published_before_every_check() -> None:
    workflow = parse_plain(WORKFLOW.read_text(), "text")
    jobs = workflow["jobs"]
    steps = [step.get("run", step.get("uses", "")) for step in jobs["build"]["steps"]]
    checks = [".ci/check_release.py", ".ci/run", "twine check", "mkdocs build --strict"]
    places = [next(i for i, step in enumerate(steps) if check in step) for check in checks]
    assert places == sorted(places)
    assert any("attest-build-provenance" in step for step in steps[places[-1] :])
    assert jobs["package"]["needs"] == "build"
    assert jobs["site"]["needs"] == "package"


def test_only_the_jobs_that_publish_may_write() -> None:
    workflow = parse_plain(WORKFLOW.read_text(), "text")
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items()}
    assert allowed["package"] == {"id-token": "write"}
    assert allowed["site"] == {"pages": "write", "id-token": "write"}
    assert "contents: write" not in WORKFLOW.read_text()
