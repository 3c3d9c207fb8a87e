"""Write docs/parity.md: `PYTHONPATH=tests:. python -m released.parity`.

The command replays every recorded run and writes how well this project agrees with it.
"""

import math
import re
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from helpers.paths import ROOT
from scipy.stats import ks_2samp

from released import pictures, record, recording, replaying

PAGE = ROOT / "docs" / "parity.md"
NAMES = (
    "big_vision",
    "dcformer",
    "dcformer_pytorch",
    "fairseq",
    "jit",
    "local_vit",
    "lra",
    "mgk_language_model",
    "modded_nanogpt",
    "nanochat",
    "nanogpt",
    "segmenter",
    "spt_lsa_vit",
    "vit_small",
)
SETUPS: dict[str, ModuleType] = {name: import_module(f"released.{name}") for name in NAMES}
"""The recorded set-ups: a module each, named as its file of records."""
PIPELINES: dict[str, ModuleType] = {
    name: import_module(f"released.{name}")
    for name in (
        "big_vision_images",
        "jit_images",
        "local_vit_images",
        "lra_order",
        "segmenter_images",
    )
}
"""The recorded input pipelines: a module each, named as its file of records."""

CONVERSIONS: dict[str, ModuleType] = {"dcformer_logits": import_module("released.dcformer_logits")}
"""The recorded outputs of released classes, whose weights are converted."""

HEAD = """\
# Parity with released code

The published numbers come from released code. This page says how closely this project's training
steps follow that code. Each row compares two trainings in float64 on a CPU, from the same initial
weights, on the same batches, with the same draws of dropout, stochastic depth, MixUp and CutMix:

- the released code at the stated commit, run by a recorder in `tests/released/`, and
- the shipped experiment with this project's task, optimiser and Lightning Trainer. Overrides
  shrink the model and the schedule to the recorded size.

Learning rates, both betas and the weight decay of every parameter agree at every step to 12
digits. The other columns are the largest differences over all steps, parameters and runs, relative
to the largest recorded value of the same quantity, rounded up to a power of ten, so that different
processors give the same page (rounding errors, below 1e-12, differ between them; for bfloat16 the
table has the tolerance). `loss` is the training loss, `gradient` the norm
of each parameter's gradient after clipping, `change` the norm of the difference between a
parameter's last and first value, and `weights` eight values of each parameter after the last step.
`output` is the largest difference of what the trained model computes in evaluation: logits,
probabilities, metrics, or averaged weights. `initial` counts the parameters whose initial values
come from the distribution of the released ones. They are compared before both sides get the same
weights, by the standard deviation and a two-sample Kolmogorov-Smirnov test.

Continuous integration replays every run and fails if a difference exceeds the tolerance of its
set-up, so a change that moves a set-up away from its released code is noticed. The captions of
published studies state the tolerance of the losses (`parity` in `ablations.yaml`) and, in one
sentence each, the differences that remain. Sections
[15](setups.md#15-known-differences-from-the-released-code) and
[16](setups.md#16-translation-iwslt-2014-wmt-2014-and-multi30k) of the set-ups list them. A second
row of a set-up has the runs to which such a difference applies.

Talking heads have no released training code. `tests/attention/test_mechanisms.py` trains this
project's layer beside the one that timm has for CaiT, without the biases that only timm's has.

Mechanisms that are no published set-up of this project are compared as single layers: output and
gradients, in float64, from the same parameters (`tests/released/mechanisms.py`). The section of a
preset in [mechanisms.md](mechanisms.md) names its released code, or the reason why there is none.

The comparison covers half precision, two ranks and `torch.compile` in one run each (`bf16`, `ddp`
and `compile` of nanoGPT), and the reading of image files in the evaluation of local_vit. A
[second table](#input-pipelines) compares the images of training, after reading and augmentation.
Everything runs on a CPU, so the comparison does not cover the kernels of a GPU. It says nothing
about published accuracies: none has been reproduced here.

"""

COLUMNS = ("released code", "commit", "experiment", "runs", "steps")
QUANTITIES = ("loss", "gradient", "change", "weights", "output", "initial")

PIPELINE_COLUMNS = ("released code", "commit", "libraries", "experiment")
PIPELINE_COLUMNS += ("compared", "number", "identical", "difference")

TAIL = """
## Input pipelines

In these rows the released code reads generated images from files and augments them, with the
versions of its libraries that its requirements name. The data module of the shipped experiment
reads the same files, with the installed versions. Both sides use the installed Pillow, OpenCV and
torchvision, and both set the same seed before each image. `identical` counts the results whose
values are all equal, and `difference` is the largest difference of {projections} weighted sums over
all values of a result. The weights of a sum have the length one. The rows of the Long Range Arena
compare the order in which samples are read; the random orders are the same on both sides.

{pipelines}
## Converted weights

The converter of released weights (`experiments/released/released_weights.py`) reads random weights
of the released classes. `difference` is the largest difference of the logits, relative to the
largest one and rounded up to a power of ten.

{conversions}
## What each replay covers

{notes}
## Record again

    git clone REPOSITORY CLONE && git -C CLONE checkout COMMIT
    PYTHONPATH=tests:. python -m released.record SETUP CLONE
    PYTHONPATH=tests:. python -m released.parity

A recorder refuses any other commit. It changes the released text only for device, precision, size
and the source of the batches, and every such replacement must match exactly once. Imported modules
that only log, print or plot are replaced by empty ones.
"""


class Agreement(NamedTuple):
    """Largest relative differences over the runs of one set-up."""

    loss: float
    gradient: float
    change: float
    sample: float
    output: float | None
    initial: str


def tolerances(setup: str, run: str) -> dict[str, float]:
    """Return the largest allowed relative difference of each quantity in a run."""
    module = SETUPS[setup]
    return {**module.TOLERANCES, **getattr(module, "RUN_TOLERANCES", {}).get(run, {})}


def words(setup: str) -> str:
    """Return the agreement of a set-up for captions: the tolerance of losses, by group of runs."""
    module = SETUPS[setup]
    text = f"{module.REPOSITORY}, losses within {module.TOLERANCES['loss']:.0e}"
    groups: dict[float, list[str]] = {}
    for run, limits in getattr(module, "RUN_TOLERANCES", {}).items():
        groups.setdefault(limits["loss"], []).append(run)
    text += "".join(
        f", {limit:.0e} in the run{'s' * (len(runs) > 1)} {' and '.join(runs)}"
        for limit, runs in groups.items()
    )
    return text


class Departure(NamedTuple):
    """Row of the tables of departures in docs/setups.md: file patterns of experiments, sentence."""

    experiments: list[str]
    sentence: str


def departures() -> list[Departure]:
    """Return the departures from released code that docs/setups.md lists, in their order."""
    rows = []
    for line in (ROOT / "docs" / "setups.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        patterns = re.findall(r"`([^`]+\.yaml)`", cells[0])
        if line.startswith("| `") and patterns:
            rows.append(Departure(patterns, cells[-1]))
    return rows


def caption_words(agreement_words: str, experiment: str) -> str:
    """Return the words of a study's captions: its agreement and the departures of its experiment.

    `experiment` is the path of its file in experiments/.
    """
    rows = [row for row in departures() if any(fnmatch(experiment, p) for p in row.experiments)]
    return " ".join([f"{agreement_words}.", *(row.sentence for row in rows)])


def records(setup: str) -> dict[str, recording.Arrays]:
    """Return the recorded arrays of each run of a set-up."""
    runs: dict[str, recording.Arrays] = {}
    with np.load(record.FOLDER / f"{setup}.npz") as archive:
        for key in archive:
            run, _, quantity = key.rpartition("/")
            if run:
                runs.setdefault(run, {})[quantity] = archive[key]
    return runs


def origin(setup: str) -> dict[str, str]:
    """Return the repository, commit, date and versions of a set-up's records."""
    with np.load(record.FOLDER / f"{setup}.npz") as archive:
        return {key: str(archive[key]) for key in archive if "/" not in key}


def agreement(setup: str, runs: list[str]) -> Agreement:
    """Replay runs of a set-up and return the largest relative differences."""
    worst = dict.fromkeys(SETUPS[setup].TOLERANCES, 0.0)
    parameters = differing = 0
    for run, theirs in records(setup).items():
        if run not in runs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            ours = replaying.replay_run(SETUPS[setup], run, Path(folder))
        parameters += len(theirs["names"])
        differing += len(initial_differences(ours, theirs))
        for key in worst:
            difference = np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max()
            worst[key] = max(worst[key], float(difference))
    main = {key: worst.pop(key) for key in ("loss", "gradient", "change", "sample")}
    initial = f"{parameters - differing} of {parameters}"
    if "" in getattr(SETUPS[setup], "OTHER_INITIAL_VALUES", ()):
        initial = "-"
    return Agreement(**main, output=max(worst.values(), default=None), initial=initial)


def initial_differences(ours: recording.Arrays, theirs: recording.Arrays) -> list[str]:
    """Return the parameters whose initial values come from other distributions on both sides.

    The standard deviations over all values may differ by six standard errors of a normal sample,
    the samples must pass a Kolmogorov-Smirnov test at the level 1e-5, and constants must be equal.
    """
    differing = []
    for number, name in enumerate(theirs["names"].tolist()):
        pair = [
            (side["initial"][number], float(side["deviation"][number])) for side in (ours, theirs)
        ]
        (our_values, our_deviation), (values, deviation) = pair
        our_values, values = our_values[~np.isnan(our_values)], values[~np.isnan(values)]
        if deviation == 0 or our_deviation == 0:
            agrees = deviation == our_deviation and bool(np.all(our_values[0] == values[0]))
        else:
            size = np.prod([int(n) for n in str(theirs["shapes"][number]).split(",")])
            agrees = abs(np.log(our_deviation / deviation)) < 6 / np.sqrt(size)
            agrees &= ks_2samp(our_values, values).pvalue > 1e-5
        if not agrees:
            differing.append(name)
    return differing


def page() -> str:
    """Return the text of docs/parity.md."""
    columns, notes = [*COLUMNS, *QUANTITIES], ""
    rows = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for setup, module in SETUPS.items():
        source, runs = origin(setup), records(setup)
        steps = max(len(arrays["loss"]) for arrays in runs.values())
        link = f"[{source['repository']}](https://github.com/{source['repository']})"
        apart = getattr(module, "RUN_TOLERANCES", {})
        for group in ([run for run in runs if run not in apart], list(apart)):
            if group:
                values = agreement(setup, group)._asdict()
                if group == list(getattr(module, "HALF_PRECISION", ())):
                    values |= module.RUN_TOLERANCES[group[0]]
                numbers = " | ".join(
                    bound(value) if isinstance(value, float) else value or "-"
                    for value in values.values()
                )
                rows += f"| {link} | {source['commit']} | {module.EXPERIMENT} "
                rows += f"| {', '.join(group)} | {steps} | {numbers} |\n"
        summary = " ".join(module.__doc__.split())
        notes += f"**{setup}.** {summary} Recorded on {source['date']} with {source['versions']}. "
        notes += f"Runs: {', '.join(runs)}.\n\n"
    for setup, module in {**PIPELINES, **CONVERSIONS}.items():
        source, runs = origin(setup), records(setup)
        notes += f"**{setup}.** {' '.join(module.__doc__.split())} Recorded on {source['date']} "
        notes += f"with {source['versions']}. Runs: {', '.join(runs)}.\n\n"
    projections, pipelines = pictures.PROJECTIONS, pipeline_table()
    tables = {"pipelines": pipelines, "conversions": conversion_table()}
    return HEAD + rows + TAIL.format(projections=projections, notes=notes, **tables)


def bound(difference: float) -> str:
    """Return the least power of ten that is not less than `difference`, from 1e-12 on."""
    return f"{10 ** math.ceil(math.log10(difference)):.0e}" if difference > 1e-12 else "< 1e-12"


def comparer(module: ModuleType) -> Callable[..., pictures.Comparison]:
    """Return the function that compares the records of an input pipeline."""
    return getattr(module, "compare", pictures.compare)


def pipeline_table() -> str:
    """Return the rows of the input pipelines: how many results are identical, and differences."""
    rows = f"| {' | '.join(PIPELINE_COLUMNS)} |\n|{'---|' * len(PIPELINE_COLUMNS)}\n"
    for setup, module in PIPELINES.items():
        source = origin(setup)
        link = f"[{source['repository']}](https://github.com/{source['repository']})"
        first = f"| {link} | {source['commit']} | {', '.join(module.LIBRARIES)} "
        for run, theirs in records(setup).items():
            with tempfile.TemporaryDirectory() as folder:
                ours = module.replay(run, Path(folder))
            for name in module.TOLERANCES:
                number, identical, difference = comparer(module)(name, ours, theirs)
                rows += f"{first}| {module.EXPERIMENT} | {name} | {number:,} "
                rows += f"| {identical:,} | {difference:.0e} |\n"
    return rows


def conversion_table() -> str:
    """Return the rows of converted weights: the largest difference of the logits of each run."""
    rows = "| released code | commit | converter | run | difference |\n|---|---|---|---|---|\n"
    for setup, module in CONVERSIONS.items():
        source = origin(setup)
        link = f"[{source['repository']}](https://github.com/{source['repository']})"
        for run, theirs in records(setup).items():
            difference = relative_difference(module.replay(run, theirs), theirs)
            rows += f"| {link} | {source['commit']} | {module.EXPERIMENT} | {run} "
            rows += f"| {bound(difference)} |\n"
    return rows


def relative_difference(ours: recording.Arrays, theirs: recording.Arrays) -> float:
    """Return the largest difference of the logits, relative to the largest recorded one."""
    difference = np.abs(ours["logits"] - theirs["logits"]).max() / np.abs(theirs["logits"]).max()
    return float(difference)


if __name__ == "__main__":
    PAGE.write_text(page())
