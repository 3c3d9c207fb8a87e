"""Generator of the page of replications.

`python docs/generators/write_replications.py > docs/replications.md` writes it from the published
numbers in experiments/papers and the committed records of our trainings in reports/evidence.
"""

import csv
from pathlib import Path

from lit_attn.papers.layout import Layout, Replication
from lit_attn.papers.replications import format_replication, judge_text
from lit_attn.papers.source import FOLDER, SMALL_FILE, PaperSource, read_paper

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "reports" / "evidence"

HEAD = """\
<!-- python docs/generators/write_replications.py > docs/replications.md writes this page. -->

# Published numbers beside ours

A tool that says what others may claim starts with its own numbers. Each row is a number that
somebody published, or that published code gives when we run it, the study of ours that trains the
same set-up, and what came out. A row that fails stays here, and so does one that has not run.

- The difference is our mean over n seeds minus the published number. Its 95 % interval holds the
  noise of both sides. Where no deviation was published, a published run counts with the deviation
  of our seeds, or, for nanoGPT's README, with that of six runs of its code. A number of one run is
  therefore known no better than one run of ours, and many seeds of ours do not change that.
- **reproduced**: the interval lies within the margin on both sides of 0. **not reproduced**: it
  lies outside. **undecided**: neither.
- The margin is how far two means may differ and still be called equal. It was chosen for each
  number alone, before its study ran; that of nanoGPT's set-up for a CPU was written after a first
  study of three seeds, which was undecided, and before the one that is shown.
- The last column says what still differs between both set-ups.
- Tests hold the page to the records in `reports/evidence`. `python -m lit_attn.report --paper NAME`
  judges your own trainings in the same way.

"""
TABLE = """
## {title}

[Published here]({link}): {caption}.

| cell | our study | published (runs) | ours | n | difference [95 %] | margin | verdict | differs |
|---|---|---:|---:|---:|---:|---:|---|---|"""
STUDIES = "../reports/evidence"

FOOT = """
## How to run them

Each command trains what its rows need, and continues where it was interrupted:

{commands}

A published number is an entry under `replications` in the file of its paper: the row and column of
the table that prints it, the margin, and the number of published runs
(`experiments/papers/nanogpt.yaml` is a short one)."""


def main() -> None:
    """Print the page."""
    print(HEAD)
    commands = []
    for path in sorted((ROOT / FOLDER).glob("*.yaml")):
        if path.name == SMALL_FILE:
            continue
        source = read_paper(path.stem, folder=path.parent)
        for number, item in source.items(()).items():
            if not item.replications:
                continue
            caption = item.caption[0].lower() + item.caption[1:]
            title = f"{source.paper.title}, table {number}"
            print(TABLE.format(title=title, link=source.paper.link, caption=caption))
            studies = set()
            for replication in item.replications:
                print(make_row(source, item, replication))
                studies.add(source.find_replicated(item, replication)[1].study)
            file = (path.parent / source.paper.studies).resolve().relative_to(ROOT)
            command = f"    python -m lit_attn.ablate {file} --study"
            commands += [f"{command} {study}" for study in sorted(studies)]
    print(FOOT.format(commands="\n".join(commands)))


def make_row(source: PaperSource, item: Layout, replication: Replication) -> str:
    """Return the row of a published number."""
    published, reference = source.find_replicated(item, replication)
    values, waiting = read_values(reference.study, reference.variant)
    equivalence = judge_text(published, replication, list(values.values()), waiting)
    texts = [cell.text for cell in format_replication(published, replication, values, equivalence)]
    place = f"{replication.row}, {item.name_column(replication.column)}"
    study = (
        f"[`{reference.study}`]({STUDIES}/{reference.study}/table.md)"
        if values
        else f"`{reference.study}`"
    )
    return "| " + " | ".join([place, study, *texts, replication.remains]) + " |"


def read_values(study: str, variant: str) -> tuple[dict[int, float], int]:
    """Return our value of each finished seed, by seed, and the number of the other planned seeds.

    A study without a committed record has neither.
    """
    path = EVIDENCE / study / "per_seed.csv"
    if not path.exists():
        return {}, 0
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["variant"] == variant]
    values = {int(row["seed"]): float(row["value"]) for row in rows if row["status"] == "done"}
    return values, len(rows) - len(values)


if __name__ == "__main__":
    main()
