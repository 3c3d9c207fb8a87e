"""Mistakes are drawn from the code by kind, and each changes one expression of a file."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from helpers.commands import run_python
from helpers.paths import ROOT

CODE = '''"""Words."""

def compute(x: float = 1.0, *, dim: int = 0) -> float:
    """More words."""
    if x < 2:
        raise ValueError(f"{x} is less than {1 + 1}")
    y = -x * 3.0 + len("é") - f(x, 4)
    return y.sum(dim=-1, keepdim=True) if y is not None and x else y
'''
CHANGES = {
    "if x < 2:": {"if (x <= 2):", "if x < 3:"},
    """y = -x * 3.0 + len("é") - f(x, 4)""": {
        """y = (x) * 3.0 + len("é") - f(x, 4)""",
        """y = -x * 6.0 + len("é") - f(x, 4)""",
        """y = ((-x) / (3.0)) + len("é") - f(x, 4)""",
        """y = ((-x * 3.0) - (len('é'))) - f(x, 4)""",
        """y = ((-x * 3.0 + len('é')) + (f(x, 4)))""",
        """y = -x * 3.0 + len("é") - f(4, x)""",
        """y = -x * 3.0 + len("é") - f(x, 5)""",
    },
}


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "tests" / "mutations" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_mistakes_change_one_expression_and_no_words(draw: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    mistakes = draw.list_mistakes(Path("code.py"), tmp_path)
    lines = CODE.splitlines()
    changed: dict[str, set[str]] = {}
    for mistake in mistakes:
        text = mistake.apply(CODE)
        ast.parse(text)
        line = lines[mistake.line - 1].strip()
        changed.setdefault(line, set()).add(text.splitlines()[mistake.line - 1].strip())
    last = changed.pop(lines[-1].strip())
    assert changed == CHANGES
    assert {mistake.kind for mistake in mistakes} >= {"axis", "keyword", "choice", "and, or"}
    assert "return y.sum(keepdim=True, dim=-1 - 1) if y is not None and x else y" in last


def test_every_area_has_code_and_a_draw_that_its_seed_repeats(draw: ModuleType) -> None:
    for area in draw.AREAS.values():
        files = draw.list_files(area, ROOT)
        drawn = draw.draw_mistakes(files, ROOT, 5, 3)
        assert len(drawn) == 5
        assert draw.draw_mistakes(files, ROOT, 5, 3) == drawn
        assert draw.draw_mistakes(files, ROOT, 5, 4) != drawn
        paths = [test for test in area.tests if test.startswith("tests/")]
        assert all((ROOT / path).exists() for path in paths)


@pytest.mark.process
@pytest.mark.parametrize(
    ("tests", "answer"),
    [("test_a.py", "{}"), ("--no-such-option", "{'(USAGE_ERROR)': 1}"), ("empty.py", "{'(NO")],
)
def test_tests_that_did_not_run_have_not_passed(tmp_path: Path, tests: str, answer: str) -> None:
    (tmp_path / "test_a.py").write_text("def test_a():\n    pass\n")
    (tmp_path / "empty.py").touch()
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'mutations')!r})\n"
    code += (
        f"import run, pathlib; print(run.run_tests(pathlib.Path({str(tmp_path)!r}), [{tests!r}]))"
    )
    finished = run_python(tmp_path, "-c", code)
    assert finished.stdout.startswith(answer), finished.stderr
