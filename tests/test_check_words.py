"""The check of words names every kind of mistake, with its line, and accepts what is right."""

from pathlib import Path

import pytest
from helpers.commands import run_new_python
from helpers.paths import ROOT

MODULE = '''\
"""Functions that add numbers."""

LIMIT = 3
"""What a sum may be."""


def add(given: int) -> int:
    """It adds one. Of all sums the largest counts."""
    # Of the caller.
    total = given + 1  # As the paper has it.
    return total
'''
MISTAKES = {
    4: ["What"],
    7: ["given"],
    8: ["It", "Of"],
    9: ["Of", "Of"],
    10: ["As"],
}
RIGHT = '''\
"""Functions that add numbers."""


def add(number: int) -> int:
    """Return the number plus one."""
    # The caller has checked the number, and a sum
    # of two numbers is a number.
    return number + 1
'''


def find_mistakes(path: Path, content: str) -> dict[int, list[str]]:
    """Return the words that the check names in a file with this content, by line."""
    path.write_text(content)
    done = run_new_python(ROOT, ".ci/check_words.py", str(path))
    mistakes: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        place, _, message = line.removeprefix(f"{path}:").partition(": ")
        words = message.split("'")
        word = words[1] if len(words) > 1 else message.split()[-1]
        mistakes.setdefault(int(place), []).append(word)
    assert done.returncode == (1 if mistakes else 0), done.stderr
    return mistakes


@pytest.mark.process
def test_mistakes_of_a_module_are_named_with_their_lines(tmp_path: Path) -> None:
    found_by_line = find_mistakes(tmp_path / "wrong.py", MODULE)
    assert {line: sorted(words) for line, words in found_by_line.items()} == MISTAKES
    assert find_mistakes(tmp_path / "right.py", RIGHT) == {}


@pytest.mark.process
def test_comments_of_yaml_and_sentences_of_a_page_are_checked(tmp_path: Path) -> None:
    assert find_mistakes(tmp_path / "a.yaml", "a: '# Of'\n# Of a\nb: 1 # How\n") == {
        2: ["Of", "Of"],
        3: ["How"],
    }
    page = "# Page\n\nA sum is a number. Of all\nsums one counts.\n\n```\nOf code\n```\n"
    assert find_mistakes(tmp_path / "page.md", page) == {3: ["Of"]}
