"""Check of the attention paths that a cell takes on a GPU, before it trains.

Each call of an attention layer that differs from the others (lit_attn.models.attention_calls) is
compared with its formula in the precision of the cell, in a process of its own. That happens once
for each combination of GPU, torch and attention code, and not at all after `lit-attn doctor`, which
compares presets. The record (lit_attn.attention.path_record) names the paths that failed, and these
are not used.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from lit_attn.attention import path_record
from lit_attn.attention.dispatch import Path
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.path_record import Combination, PathRecord, read_combination
from lit_attn.checks.apart import run_apart
from lit_attn.checks.comparison import (
    BF16,
    FLOAT32,
    FP16,
    TF32,
    Case,
    Shape,
    build_noisy_layer,
    check_layer,
)
from lit_attn.checks.paths import read_case_path, require_device
from lit_attn.config.cell import Cell
from lit_attn.files import one_at_a_time
from lit_attn.models.attention_calls import AttentionCall, find_calls
from lit_attn.schema.errors import ConfigError, plural

LIMIT = 300.0
"""Seconds after which the check of a call counts as a hang."""

BATCH = 2

LAST_PATH = Path.FORMED.name
"""Path that can replace every other one."""

PRECISIONS = {"fp32": FLOAT32, "tf32": TF32, "bf16": BF16, "fp16": FP16}
"""Arithmetic of each `training.precision`."""

CORES_OF_CHECK = 4
"""Cores for each of the checks that run at once: compiling a kernel takes a core seconds."""


class CallOutcome(NamedTuple):
    """Path of a call, and why it fails; or why nothing is known. Other texts are empty."""

    path: str = ""
    failure: str = ""
    unavailable: str = ""


def check_before_first_cell(cell: Cell) -> None:
    """Check the calls of `cell` that have no record, and print a line for each refused path.

    Other cells of this combination wait meanwhile. A CPU is not checked, but the record that
    `lit-attn doctor` has written for it counts.
    """
    has_gpu = cell.experiment.training.accelerator != "cpu" and torch.cuda.is_available()
    kind = "cuda" if has_gpu else "cpu"
    if has_gpu:
        _check_on_gpu(cell, read_combination(kind))
    for path, reason in path_record.refused_paths(kind).items():
        print(f"attention path {path} is not used: it failed a check on this machine ({reason})")


def _check_on_gpu(cell: Cell, combination: Combination) -> None:
    """Check the calls of `cell` that the record of `combination` lacks, and extend the record."""
    precision = cell.experiment.training.precision
    record = PathRecord.read_valid(combination.file)
    if record is not None and record.is_of_doctor:
        return
    calls = find_calls(cell.experiment.model, cell.experiment.data)
    if not _list_unchecked(calls, precision, record):
        return
    with one_at_a_time(combination.file.parent, combination.file.stem):
        # Another cell may have checked some of them in the meantime.
        record = PathRecord.read_valid(combination.file)
        calls = _list_unchecked(calls, precision, record)
        if not calls:
            return
        names = ", ".join(dict.fromkeys(call.preset for call in calls))
        print(
            f"first cell of its kind on {combination.device} with torch {combination.torch}: "
            f"checking {plural(len(calls), 'attention call')} in {precision} ({names})",
            flush=True,
        )
        refused = {} if record is None else dict(record.refused)
        checked = [] if record is None else list(record.calls)
        for call in check_calls(calls, precision, refused):
            checked.append(call.describe(precision))
        path_record.set_refused("cuda", refused)
        path_record.remember(combination, held=[], refused=refused, calls=checked)


def _list_unchecked(
    calls: Sequence[AttentionCall], precision: str, record: PathRecord | None
) -> list[AttentionCall]:
    """Return those of `calls` that `record` does not have."""
    if record is None:
        return list(calls)
    if record.is_of_doctor:
        return []
    return [call for call in calls if call.describe(precision) not in record.calls]


def check_calls(
    calls: Sequence[AttentionCall], precision: str, refused: dict[str, str]
) -> list[AttentionCall]:
    """Return the `calls` whose check has an outcome, and add the paths that fail to `refused`.

    A call whose path is refused is checked again on the path that replaces it. Raises ConfigError
    if a call fails on the last path too: then its layer is wrong, and not the paths, which others
    may use.
    """
    checked = []
    unchecked = list(calls)
    processes = max(1, len(os.sched_getaffinity(0)) // CORES_OF_CHECK)
    while unchecked:
        check = partial(check_call, precision=precision, refused=tuple(refused))
        with ThreadPoolExecutor(processes) as threads:
            outcomes = list(threads.map(check, unchecked))
        failures = {outcome.path: outcome.failure for outcome in outcomes if outcome.failure}
        if LAST_PATH in failures:
            raise ConfigError(
                "attention: on this machine a layer fails the check of each path that it can take: "
                f"{failures[LAST_PATH]}. Train on another device, or with another version of torch."
            )
        # Running sums have no other path, so they can fail although they are refused.
        new_failures = {path: failures[path] for path in failures if path not in refused}
        refused.update(new_failures)
        again = []
        for call, outcome in zip(unchecked, outcomes, strict=True):
            if outcome.unavailable:
                print(f"warning: {call.preset} could not be checked: {outcome.unavailable}")
            elif outcome.path in new_failures:
                again.append(call)
            else:
                checked.append(call)
        unchecked = again
    return checked


def check_call(call: AttentionCall, precision: str, refused: Sequence[str]) -> CallOutcome:
    """Return the outcome of the check of `call` without `refused` paths."""
    outcome = run_apart(compare_call, (call, precision, refused, "cuda"), LIMIT)
    if outcome.unavailable or not outcome.results:
        return CallOutcome(unavailable=outcome.unavailable or outcome.failure)
    path, *failures = outcome.results
    if outcome.failure:
        # The process has hung or crashed.
        return CallOutcome(path, f"{call.preset}, {precision}: {outcome.failure}")
    return CallOutcome(path, failures[0])


def compare_call(
    call: AttentionCall, precision: str, refused: Sequence[str], device_name: str
) -> Iterator[str]:
    """Yield the path of a call without `refused` paths, and then why it fails, or an empty text.

    Raises Unavailable if nothing can be known.
    """
    device = torch.device(device_name)
    path_record.set_refused(device.type, dict.fromkeys(refused, "failed"))
    require_device(device)
    layer, case = build_case(call, precision)
    path = read_case_path(layer.to(device), device, case)
    yield path
    yield check_layer(call.preset, path, layer, case, device).failure


def build_case(call: AttentionCall, precision: str) -> tuple[Attention, Case]:
    """Return the layer of a call with nonzero parameters, and the comparison of it."""
    dim = call.heads * call.head_dim
    layer_class = attn_layer(call.spec, local_self_attention=call.is_local)
    layer = build_noisy_layer(layer_class, dim, call.heads, qkv_bias=True)
    shape = Shape(BATCH, call.tokens, dim, call.heads)
    arithmetic = PRECISIONS[precision]
    return layer, Case(arithmetic, call.is_causal, shape, call.has_mask, call.is_cross)
