"""The examination: every check in its order, printed while it runs."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from lit_attn.attention.spec import PRESETS
from lit_attn.bench import attention
from lit_attn.bench.measure import Setup
from lit_attn.cells.records import utc_now
from lit_attn.checks.apart import Outcome, count_processes, run_shares
from lit_attn.checks.comparison import LayerCheck
from lit_attn.checks.paths import (
    SHAPES,
    Selection,
    build_layer,
    check_compiled,
    check_path,
    explain_path,
    has_compiler,
    list_paths,
    read_path,
)
from lit_attn.doctor.machine import describe_device, describe_machine, hash_attention_code
from lit_attn.doctor.trainings import TrainingCheck, check_trainings
from lit_attn.doctor.verdict import Choice, Examination, PathCheck, Speed, make_table
from lit_attn.temporary import temporary_folder

PATH_LIMITS = {True: 300.0, False: 1800.0}
"""Seconds for all comparisons on one path, in the short form and in the full one."""

COMPILED_LIMIT = 1800.0  # Seconds for all compiled layers.

ROUNDS = 5  # Measurements of each block.

BLOCKS = {"cpu": attention.Shape(batch=8), "cuda": attention.Shape(batch=128)}
"""Shape of the measured block: that of the CIFAR studies, with fewer samples on a CPU."""

Print = Callable[[str], None]
PathChecker = Callable[[str, str, Selection, int, int], Iterator[LayerCheck]]


def examine(device: torch.device, selection: Selection, runs: Path, show: Print) -> Examination:
    """Return the examination of this machine and device; `show` gets every line at once.

    Without named presets the full form also has compiled layers, trainings and a benchmark.
    """
    show("1. Machine")
    machine = describe_machine(runs)
    for name, fact in machine.items():
        show(f"   {name}: {fact}")
    show(f"2. Layers against the float64 reference, on {device.type}")
    paths, layers = check_paths(device, selection, show)
    show("3. Path of each preset")
    choices = list_choices(selection.presets or PRESETS, device)
    for choice in choices:
        show(f"   {choice.preset}: {choice.path} ({choice.reason})")
    compiled: list[LayerCheck] = []
    compiled_failure = ""
    compiled_not_checked = ""
    trainings: list[TrainingCheck] = []
    speeds = {}
    if not selection.is_short and not selection.presets:
        show("4. Compiled layers against the reference")
        if has_compiler(device):
            compiled, compiled_failure = _check_compiled(device, show)
        else:
            compiled_not_checked = "there is no C++ compiler"
            show(f"   not checked: {compiled_not_checked}")
        show("5. Trainings: two ranks, a resume, the same seed twice")
        with temporary_folder() as folder:
            trainings = check_trainings(folder, device)
        for training in trainings:
            show(f"   {training.describe()}")
        show("6. Blocks, forward and backward, interleaved (never part of the verdict)")
        speeds = measure_presets(list(PRESETS), device)
    examination = Examination(
        checked=utc_now(),
        is_short=selection.is_short,
        named=list(selection.presets),
        device=describe_device(device.type),
        code=hash_attention_code(),
        machine=machine,
        paths=paths,
        layers=layers,
        choices=choices,
        compiled=compiled,
        compiled_failure=compiled_failure,
        compiled_not_checked=compiled_not_checked,
        trainings=trainings,
        speeds=speeds,
    )
    for line in make_table(examination):
        show(line)
    show(examination.verdict)
    return examination


def check_paths(
    device: torch.device,
    selection: Selection,
    show: Print,
    check: PathChecker = check_path,
    seconds: float | None = None,
) -> tuple[list[PathCheck], list[LayerCheck]]:
    """Return the outcome of every path, and all comparisons of layers.

    Each path is checked in processes of its own for up to `seconds`. Comparisons of named presets
    are shown one by one.
    """
    limit = PATH_LIMITS[selection.is_short] if seconds is None else seconds

    def show_check(check: LayerCheck) -> None:
        show(f"   {check.describe()}")

    paths = []
    layers: list[LayerCheck] = []
    for path in list_paths(selection, device):
        arguments = (path, device.type, selection)
        processes = count_processes(device)
        outcome = run_shares(
            check, arguments, processes, limit, show_check if selection.presets else None
        )
        layers += outcome.results
        paths.append(judge_path(path, outcome))
        show(f"   {describe_path(paths[-1], outcome.results)}")
    return paths, layers


def judge_path(path: str, outcome: Outcome) -> PathCheck:
    """Return the outcome of a path: its first failed comparison, or the end of its process."""
    results: list[LayerCheck] = outcome.results
    failures = [check.failure for check in results if check.failure]
    failure = failures[0] if failures else outcome.failure
    return PathCheck(path, len(results), failure, outcome.unavailable)


def describe_path(path: PathCheck, results: list[LayerCheck]) -> str:
    """Return one line about the comparisons of a path."""
    if path.failure:
        return f"{path.path}: FAILED, {path.failure}"
    if path.unavailable:
        return f"{path.path}: not checked, {path.unavailable}"
    if not results:
        return f"{path.path}: no preset takes it"
    error = max(result.error for result in results)
    return f"{path.path}: holds, {len(results)} comparisons, largest error {error:.1f} eps"


def list_choices(presets: Iterable[str], device: torch.device) -> list[Choice]:
    """Return the path of each preset."""
    choices = []
    for name in presets:
        layer = build_layer(name, SHAPES[0]).to(device)
        choices.append(Choice(name, read_path(layer, device), explain_path(layer, device)))
    return choices


def _check_compiled(device: torch.device, show: Print) -> tuple[list[LayerCheck], str]:
    """Return the comparisons of compiled layers, and why they ended early, if they did."""

    def show_check(check: LayerCheck) -> None:
        show(f"   {check.describe()}")

    outcome = run_shares(
        check_compiled, (device.type,), count_processes(device), COMPILED_LIMIT, show_check
    )
    results: list[LayerCheck] = outcome.results
    if outcome.failure:
        show(f"   FAILED after these: {outcome.failure}")
    return results, outcome.failure


def measure_presets(names: list[str], device: torch.device) -> dict[str, Speed]:
    """Return time and memory of the presets in float32, uncompiled, measured in turn."""
    setup = Setup(device.type, torch.float32, ROUNDS)
    rows = attention.run(names, BLOCKS[device.type], ["eager"], setup)
    by_name = {row.name: row for row in rows}
    return {name: _speed(by_name[name]) for name in names}


def _speed(row: attention.Row) -> Speed:
    """Return the row of the benchmark in the units of the table."""
    return Speed(
        milliseconds=row.seconds.median * 1e3,
        spread=row.seconds.iqr * 1e3,
        time_ratio=row.ratio.median,
        bytes=row.peak,
        memory_ratio=row.peak_ratio,
    )
