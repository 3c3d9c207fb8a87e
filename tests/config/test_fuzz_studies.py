"""Mutated studies end in one clear error or a valid plan, never in a traceback."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers import studies

from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.schema.errors import ConfigError

BODY = """\
source: "a paper, Table 1"
set: {training.epochs: 3}
axes:
  residual: [full, {kind: split, activation: gelu}]
  zz: [with, without]
  recipe: {short: {training.epochs: 1}, long: {}}
zip: [[residual, zz]]
exclude: [{recipe: short, residual: full}]
include: [{residual: value, zz: without}]
overrides: {"residual=full": {optimizer.lr: 1e-4}}
cells: {mgk: {attention: {preset: mgk}}, none: {ffn: none, match: none}}
baseline: mgk
match: parameters
published: {mgk: [72.01, 0.20]}
metric: {name: test/accuracy, selection: last}
slurm: {partition: gpu, time: 8:00:00, mem: 32G}
"""

# What stands in YAML where one would not expect it.
ODD = [
    "null", "~", "[]", "{}", "0", "-1", "1e999", ".nan", ".inf", "true", "''", '"', "'", "*a", "&a",
    "!!python/object:os.system", "!!binary aGk=", "<<", "? x", "- -", "{{", "]", "|", ">", "%", "@",
    "../../etc/passwd", "/tmp/x", "a/b", "..", ".", "\\0", "\x00", "\x85", "\u2028", "\ufeff",
    "9" * 400, "x" * 200, "1:2:3", "0x10", "1_000", "2001-01-01", "no", "kind: full", "\t", "#",
    "{kind: split}", "{kind: {}}", "{kind: [1]}", "[full, full]", "{a: {b: {c: 1}}}", "{1: 2}",
]  # fmt: skip


def mutated(text: str, chance: random.Random) -> str:
    """`text` with one to four changes: odd words, lines and characters moved, doubled or gone."""
    for _ in range(chance.randint(1, 4)):
        lines = text.split("\n")
        row = chance.randrange(len(lines))
        words = list(re.finditer(r"[^\s:,\[\]{}]+", lines[row]))
        match chance.randrange(8):
            case 0 | 1 | 2 if words:
                word = chance.choice(words)
                lines[row] = (
                    lines[row][: word.start()] + chance.choice(ODD) + lines[row][word.end() :]
                )
            case 3:
                del lines[row]
            case 4:
                lines.insert(chance.randrange(len(lines)), lines[row])
            case 5:
                lines[row] = lines[row].replace("  ", "", 1)
            case 6:
                place = chance.randint(0, len(lines[row]))
                lines[row] = lines[row][:place] + chance.choice(ODD) + lines[row][place:]
            case _:
                place = chance.randint(0, len(lines[row]))
                lines[row] = lines[row][:place] + lines[row][place + 1 :]
        text = "\n".join(lines)
    return text


def check(folder: Path, count: int, seed: int) -> Counter[str]:
    """Mutate a study or its experiment `count` times; how many were valid, and how many not."""
    chance = random.Random(seed)
    path = studies.write(folder, BODY)
    originals = {file: file.read_text() for file in (path, folder / "experiment.yaml")}
    out = (folder / "runs").resolve()
    ends: Counter[str] = Counter()
    for number in range(count):
        for file, text in originals.items():
            file.write_text(text)
        file = chance.choice(list(originals))
        text = mutated(originals[file], chance)
        file.write_text(text, newline="")
        try:
            cells = [job for one in read_studies(path).values() for job in expand(one, out).jobs]
        except ConfigError as error:
            said = str(error)
            assert len(said.splitlines()) == 1, f"{number}: {said!r}\n{text}"
            assert said.strip(), f"{number}:\n{text}"
            assert "Traceback" not in said
            ends["error"] += 1
        except Exception as error:
            raise AssertionError(f"number {number} of seed {seed}:\n{text}") from error
        else:
            ends["plan"] += 1
            assert cells
            for job in cells:
                # Two below: the variant's folder and the cell's.
                assert job.folder.resolve().parents[2] == out, job.folder
    return ends


def test_mutated_studies(tmp_path: Path) -> None:
    ends = check(tmp_path, 500, 0)
    assert ends["plan"] > 20
    assert ends["error"] > 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_mutated_studies(tmp_path: Path) -> None:
    assert check(tmp_path, 10_000, 1).total() == 10_000
