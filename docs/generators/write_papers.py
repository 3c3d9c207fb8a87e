"""Generator of the page of papers: `python docs/generators/write_papers.py > docs/papers.md`."""

import re
from pathlib import Path

from lit_attn.papers.layout import Figure
from lit_attn.papers.runs import UTILISATION, estimate_costs, expand_paper, format_item
from lit_attn.papers.source import PaperSource, read_paper

# Short names of the papers.
TITLES = {
    "beliefformer": "BeliefFormer",
    "attentionx": "AttentionX",
    "belief2": "Belief2",
    "mgk": "MGK",
    "dcmha": "DCMHA",
}
GPU = "H100"
FOLDER = Path(__file__).parents[2] / "experiments" / "papers"

FOUR_GPUS = "--set training.strategy=fsdp --set training.devices=4 --set data.batch_size=4"
HEAD = f"""\
<!-- python docs/generators/write_papers.py > docs/papers.md writes this page. -->

# The papers, table by table

The tables and figures of the five papers: the command that runs or measures each of them, and its
cost. Their published values are in `experiments/papers/*.yaml`.

    python -m lit_attn.ablate --paper mgk --table 1               run the cells that a table needs
    python -m lit_attn.ablate --paper mgk --table figure-5        run the cells that a figure needs
    python -m lit_attn.ablate --paper mgk                         run the cells of all of them
    python -m lit_attn.ablate --paper mgk --small                 small models, without a download
    python -m lit_attn.ablate --paper mgk --small-data            small models on real data in data/
    python -m lit_attn.ablate --paper mgk --cost A100             print the GPU time of each table
    python -m lit_attn.report --paper mgk                         write reports/paper-mgk/index.html

`--dry-run`, `--seeds`, `--jobs`, `--launcher slurm` and the other options of a study work here
too. The results of a cell lie in the folder of its study, so tables that share cells share their
results.

## How to read a page

The page of a paper has its tables in the paper's order of rows and columns. Below each row of
published values is a row with our values: the mean over seeds ± the sample standard deviation, and
the number n of seeds. A cell that has not run is empty; — stands where no study of this size
measures the cell. Alternative readings of a set-up ([setups.md](setups.md)) stand in a block of
their own. `experiments/papers/*.yaml` have every published cell exactly as printed; cells that
contradict other cells of the paper are listed there under `slips`.

A claim is judged by the difference between two rows, paired by seed. It is undecided if the 95 %
interval contains 0, if there is only one pair of seeds, if a time was measured on a busy machine,
or if seeds have failed and a test of signed ranks at 0.05 does not confirm the direction. Claims
about the same difference share a row. No interval is corrected for the number of claims.

A row has the floor of each study: the best value that a rule without
attention reaches on the same data and split ([statistics.md](statistics.md#floors)). A study whose
baseline is below its floor has a warning, and its claims have the mark *(below its floor)*. A run
computes the floors, except on SLURM.

Counts, the cost of models with random weights and measurements of released weights need no training
of ours: scripts write their files, and their commands stand in the table below
([released-weights.md](released-weights.md) has examples). Their differences have the 95 % normal
interval of the standard errors in the file (key `error` of a column); a claim without one is
undecided. Numbers of parameters and FLOPs are counted for rows that have not run
(`experiments/papers/counts/costs.csv`).

`--smoke` trains one step of every cell and writes the page, to try the whole path from cells to
page. The page says so, and has no value of such a cell.

## GPU time

The times are those of one {GPU} at {UTILISATION:.0%} of its peak, for all seeds of all variants
of the table. A training step counts three forward passes. Evaluations are not counted, images
that grow count with their final size, and small models use far less than {UTILISATION:.0%} of a
GPU: the times are a lower limit for the Long Range Arena and CIFAR. Tables that share cells share
their times.

These are estimates; nothing was measured on a GPU. Weights, gradients and states of Adam take 16
bytes for each parameter, so a model of 6.9 billion parameters needs several GPUs of 80 GB with
`training.strategy: fsdp`
([devices.md](devices.md#models-that-need-more-memory-than-a-device-has)). The first command below
trains the row of DCMHA's Table 6 that fits one GPU of 80 GB, the second one the next row on four of
them, as a side study.

    python -m lit_attn.ablate ablations.yaml --study dcmha-speed-2.8B
    python -m lit_attn.ablate ablations.yaml --study dcmha-speed-6.9B {FOUR_GPUS}

## Small models

`--small` runs the same rows at a size for two CPU cores, with at least five seeds: scikit-learn's
digits, scenes made of them, Python's own text, short ListOps expressions, and symbols. Nothing is
downloaded. With `--dry-run --estimate` you see how long a paper takes on your machine. The page
keeps small results apart from published ones, and says for each claim whether our difference lies
on the published side (agree), on the other side (disagree), or has an interval that contains 0
(undecided). A claim is *not run* if no seed has both results yet, and *not measured* if no study of
this size has both cells. The column *our study* names the data: a claim about CIFAR-10 is judged on
digits here, and its verdict says nothing about CIFAR-10.

`--small-data` uses real data for images, text and translation: `data/cifar100.npz` with the arrays
x_train, y_train, x_test and y_test; `data/ptb/ptb.train.txt`, `ptb.valid.txt` and `ptb.test.txt`;
and Multi30k's `train.lc.norm.tok.en`, `.de` and so on in `data/multi30k`. The caption of each table
and figure names its data.
"""


def write_page() -> str:
    """Return the page in Markdown."""
    sources = [read_paper(name, "", FOLDER) for name in TITLES]
    sections = [_describe(source) for source in sources]
    return "\n".join([HEAD, _list_incomplete(sources), *sections])


def _list_incomplete(sources: list[PaperSource]) -> str:
    """Return the section with the tables and figures that are not whole, and their reasons."""
    total = 0
    reasons = []
    for source in sources:
        for number, item in source.printed_items().items():
            total += 1
            if item.lacks:
                name = _name_item(number)
                reasons.append(f"- {TITLES[source.name]}, {name}: {item.lacks}")
    lead = (
        f"The five papers have {total} tables and figures that measure something. "
        f"{total - len(reasons)} of them are whole:\nthe page has them as printed, and commands "
        "fill every cell and draw every curve. The others are:\n"
    )
    return "\n".join(["## Complete tables and figures", "", lead, *reasons, ""])


def _name_item(number: str) -> str:
    """Return the name of a table ("4") or figure ("figure-4")."""
    if number.startswith("figure-"):
        return f"Figure {number.removeprefix('figure-')}"
    return f"Table {number}"


def _describe(source: PaperSource) -> str:
    """Return the section of one paper."""
    items = source.items(())
    costs = estimate_costs(source, expand_paper(source, (), Path("runs")), GPU)
    rows = []
    for number, item in items.items():
        name = re.sub("^figure-", "Figure ", number) if isinstance(item, Figure) else number
        needed = source.references(item)
        command = f"`--paper {source.name} --table {number}`" if needed else ""
        spent = "" if item.script and not needed else format_item(source, item, costs)
        script = f"`{item.script}`" if item.script else ""
        cells = (name, item.caption, " and ".join(filter(None, [command, script])), spent)
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    head = f"## {source.paper.title}\n\n[{source.paper.link}]({source.paper.link})\n"
    table = f"| table | content | command | time of one {GPU} |\n|---|---|---|---|"
    return "\n".join([head, table, *rows, ""])


if __name__ == "__main__":
    print(write_page(), end="")
