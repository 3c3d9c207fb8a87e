"""The check of supported versions tells versions that do not fit from an index that is away."""

import importlib.util
from types import ModuleType

import pytest
from helpers.paths import ROOT


@pytest.fixture
def check() -> ModuleType:
    path = ROOT / ".ci" / "check_versions.py"
    spec = importlib.util.spec_from_file_location("check_versions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oldest_versions_are_those_of_users(check: ModuleType) -> None:
    """Packages of extras count, also behind an extra of their own. Tools of tests do not."""
    lowest = check.list_lowest()
    assert set(check.PACKAGES) <= set(lowest)
    assert "pydantic" in lowest
    assert "datasets" in lowest
    assert "pytest" not in lowest


@pytest.mark.parametrize(
    ("answer", "is_right", "text"),
    [
        ({"torch": "2.11.0"}, True, "The index serves the oldest versions"),
        ("error: No solution found: pandas 2.2.0 needs numpy 1", False, "pandas 2.2.0 needs"),
        ("no answer within 120 seconds", True, "were not looked up"),
    ],
)
def test_versions_that_do_not_fit_fail_and_an_absent_index_is_named(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: dict[str, str] | str,
    is_right: bool,
    text: str,
) -> None:
    monkeypatch.setattr(check, "resolve", lambda constraints: answer)
    assert check.check_lowest({"pandas": "2.2.0"}) == is_right
    assert text in capsys.readouterr().out


def test_a_newer_version_of_the_index_is_named(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = check.list_newest()
    monkeypatch.setattr(check, "resolve", lambda constraints: {**newest, "timm": "9.0"})
    check.print_newer(newest)
    tried = newest["timm"]
    assert capsys.readouterr().out == f"timm 9.0 of the index was not tried ({tried} was).\n"
