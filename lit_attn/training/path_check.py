"""Check of attention paths before the first cell on a new combination of GPU, torch and code.

The check is `lit-attn doctor --short` in a process of its own. Its record (see
lit_attn.attention.path_record) names the paths that failed, and these are not used.
"""

import subprocess
import sys

import torch

from lit_attn.attention import path_record
from lit_attn.attention.dispatch import Path as AttentionPath
from lit_attn.attention.path_record import Combination, PathRecord, read_combination
from lit_attn.files import one_at_a_time
from lit_attn.temporary import temporary_folder

LIMIT = 1200.0
"""Seconds after which the check itself counts as a hang. It limits each path to less."""


def check_before_first_cell(accelerator: str) -> None:
    """Check the paths of a GPU without a record, and print a line for each refused path.

    Other cells of this combination wait meanwhile. A CPU is not checked, but the record that
    `lit-attn doctor` has written for it counts.
    """
    has_gpu = accelerator != "cpu" and torch.cuda.is_available()
    kind = "cuda" if has_gpu else "cpu"
    if has_gpu:
        combination = read_combination(kind)
        if PathRecord.read_valid(combination.file) is None:
            with one_at_a_time(combination.file.parent, combination.file.stem):
                _check_once(combination)
    for path, reason in path_record.refused_paths(kind).items():
        print(f"attention path {path} is not used: `lit-attn doctor` refused it ({reason})")


def _check_once(combination: Combination) -> None:
    """Run the check, unless another process has finished it in the meantime."""
    if PathRecord.read_valid(combination.file) is not None:
        return
    print(
        f"first cell on {combination.device} with torch {combination.torch}: "
        "checking the attention paths (lit-attn doctor --short)",
        flush=True,
    )
    try:
        output = run_doctor(LIMIT)
    except subprocess.TimeoutExpired:
        refuse_all(combination, f"`lit-attn doctor --short` did not end within {LIMIT:.0f} s")
        return
    if PathRecord.read_valid(combination.file) is None:
        print(f"warning: the attention paths could not be checked: {output}", flush=True)


def run_doctor(seconds: float) -> str:
    """Run the short form for up to `seconds`, and return its last line.

    Raises subprocess.TimeoutExpired.
    """
    with temporary_folder() as folder:
        command = [sys.executable, "-m", "lit_attn.doctor", "--short", "--device", "cuda"]
        done = subprocess.run(
            [*command, "--out", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1]


def refuse_all(combination: Combination, reason: str) -> None:
    """Record that every path but formed weights, which replace all others, is refused."""
    replaceable = [path.name for path in AttentionPath if path is not AttentionPath.FORMED]
    refused = dict.fromkeys(replaceable, reason)
    path_record.set_refused("cuda", refused)
    path_record.remember(combination, held=[], refused=refused)
