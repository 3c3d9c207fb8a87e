"""The list of mistakes follows the package: each text stands in it exactly once."""

import importlib.util

from helpers.paths import ROOT


def test_every_text_of_a_mistake_stands_in_the_package() -> None:
    path = ROOT / "tests" / "mutations" / "run.py"
    spec = importlib.util.spec_from_file_location("mutations", path)
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    # Each area begins with one without a text.
    mistakes = [mistake for mistake in run.read_mistakes([]) if mistake.text]
    assert len(mistakes) > 60
    run.find_files(mistakes)
