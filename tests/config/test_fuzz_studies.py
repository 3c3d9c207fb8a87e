"""A mutated study is a valid plan or one error line, and never a traceback."""

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
exclude: [{recipe: short, residual: full}]
cells: {mgk: {attention: {preset: mgk}}, none: {ffn: none, match: none}}
baseline: mgk
match: parameters
published: {mgk: [72.01, 0.20]}
metric: {name: test/accuracy, selection: last}
slurm: {partition: gpu, time: 8:00:00, mem: 32G}
"""

# Unexpected values in YAML.
ODD = [
    "null", "~", "[]", "{}", "0", "-1", "1e999", ".nan", ".inf", "true", "''", '"', "'", "*a", "&a",
    "!!python/object:os.system", "!!binary aGk=", "<<", "? x", "- -", "{{", "]", "|", ">", "%", "@",
    "../../etc/passwd", "/tmp/x", "a/b", "..", ".", "\\0", "\x00", "\x85", "\u2028", "\ufeff",
    "9" * 400, "x" * 200, "1:2:3", "0x10", "1_000", "2001-01-01", "no", "kind: full", "\t", "#",
    "{kind: split}", "{kind: {}}", "{kind: [1]}", "[full, full]", "{a: {b: {c: 1}}}", "{1: 2}",
]  # fmt: skip


def mutate(text: str, generator: random.Random) -> str:
    """Return `text` with one to four changes: odd words, and moved, doubled or deleted lines."""
    for _ in range(generator.randint(1, 4)):
        lines = text.split("\n")
        row = generator.randrange(len(lines))
        words = list(re.finditer(r"[^\s:,\[\]{}]+", lines[row]))
        match generator.randrange(8):
            case 0 | 1 | 2 if words:
                word = generator.choice(words)
                lines[row] = (
                    lines[row][: word.start()] + generator.choice(ODD) + lines[row][word.end() :]
                )
            case 3:
                del lines[row]
            case 4:
                lines.insert(generator.randrange(len(lines)), lines[row])
            case 5:
                lines[row] = lines[row].replace("  ", "", 1)
            case 6:
                place = generator.randint(0, len(lines[row]))
                lines[row] = lines[row][:place] + generator.choice(ODD) + lines[row][place:]
            case _:
                place = generator.randint(0, len(lines[row]))
                lines[row] = lines[row][:place] + lines[row][place + 1 :]
        text = "\n".join(lines)
    return text


def check(folder: Path, count: int, seed: int) -> Counter[str]:
    """Mutate a study or its experiment `count` times; return the numbers of plans and errors."""
    generator = random.Random(seed)
    path = studies.write(folder, BODY)
    originals = {file: file.read_text() for file in (path, folder / "experiment.yaml")}
    out = (folder / "runs").resolve()
    ends: Counter[str] = Counter()
    for number in range(count):
        for file, text in originals.items():
            file.write_text(text)
        file = generator.choice(list(originals))
        text = mutate(originals[file], generator)
        file.write_text(text, newline="")
        try:
            cells = [
                job for source in read_studies(path).values() for job in expand(source, out).jobs
            ]
        except ConfigError as error:
            message = str(error)
            assert len(message.splitlines()) == 1, f"{number}: {message!r}\n{text}"
            assert message.strip(), f"{number}:\n{text}"
            assert "Traceback" not in message
            ends["error"] += 1
        except Exception as error:
            raise AssertionError(f"number {number} of seed {seed}:\n{text}") from error
        else:
            ends["plan"] += 1
            assert cells
            for job in cells:
                # Three levels: the study, the variant and the cell.
                assert job.folder.resolve().parents[2] == out, job.folder
    return ends


@pytest.mark.slow
def test_mutated_studies_end_in_a_plan_or_one_error_line(tmp_path: Path) -> None:
    ends = check(tmp_path, 700, 0)
    assert ends["plan"] > 20
    assert ends["error"] > 200
