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


def check_compiled(device_name: str) -> Iterator[LayerCheck]:
    """Yield the comparison of one compiled layer for each set of properties of a call."""
    device = torch.device(device_name)
    cases = [Case(FLOAT32, False, SHAPES[0])]
    if device.type == "cuda" and BF16 in list_precisions(device):
        cases.append(Case(BF16, True, SHAPES[0]))
    for name in list_presets(True, device):
        for case in cases:
            torch.compiler.reset()
            layer = build_layer(name, case.shape).to(device)
            path = read_path(layer, device, case.is_causal)
            layer.compile()
            yield check_layer(name, path, layer, case, device)
