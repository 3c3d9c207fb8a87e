"""Compiled layers, compared with the same reference as uncompiled ones."""

import os
import shutil
from collections.abc import Iterator

import torch

from lit_attn.doctor.layers import (
    BF16,
    FLOAT32,
    SHAPES,
    Case,
    LayerCheck,
    build_layer,
    check_layer,
    list_precisions,
    list_presets,
    read_path,
)


def has_compiler(device: torch.device) -> bool:
    """Return True if torch.compile can work: code for a CPU needs a C++ compiler."""
    if device.type == "cuda":
        return True
    candidates = [os.environ.get("CXX", ""), "g++", "clang++"]
    return any(name and shutil.which(name) for name in candidates)


def check_compiled(device_name: str, process: int, processes: int) -> Iterator[LayerCheck]:
    """Yield the comparisons of compiled layers that belong to one of several processes.

    One preset for each set of properties of a call is compared in every case. On a GPU, where
    training compiles by default, every other preset is compared in one case.
    """
    device = torch.device(device_name)
    cases = [Case(FLOAT32, False, SHAPES[0])]
    if device.type == "cuda" and BF16 in list_precisions(device):
        cases.append(Case(BF16, True, SHAPES[0]))
    representatives = list_presets(True, device)
    cases_of = dict.fromkeys(representatives, cases)
    if device.type == "cuda":
        for name in list_presets(False, device):
            cases_of.setdefault(name, cases[-1:])
    for name in list(cases_of)[process::processes]:
        yield from _compare(name, cases_of[name], device)


def _compare(name: str, cases: list[Case], device: torch.device) -> Iterator[LayerCheck]:
    """Yield the comparison of the compiled layer of a preset in each case."""
    for case in cases:
        torch.compiler.reset()
        layer = build_layer(name, case.shape).to(device)
        path = read_path(layer, device, case.is_causal)
        layer.compile()
        yield check_layer(name, path, layer, case, device)
