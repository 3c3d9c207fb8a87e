"""Every script of experiments/ refuses a wrong command line in one line, with exit code 2."""

import pytest
from helpers.commands import run_python
from helpers.paths import EXPERIMENTS, ROOT


@pytest.mark.process
def test_a_wrong_option_is_one_line() -> None:
    scripts = [path for path in EXPERIMENTS.glob("*/*.py") if "OneLineParser(" in path.read_text()]
    assert len(scripts) > 8
    for script in scripts:
        name = script.relative_to(ROOT).as_posix()
        done = run_python(ROOT, name, "--bogus")
        assert done.returncode == 2, name
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"python {name}: ")
