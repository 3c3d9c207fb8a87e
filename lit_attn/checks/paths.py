"""Presets, precisions and shapes in which the attention layers of a machine are compared.

The layers of one path are checked in a process of their own (lit_attn.checks.apart), which can hang
or crash without ending the doctor. Compiled layers are compared with the same reference as
uncompiled ones.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_attn.attention import dispatch
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.own_presets import load_presets
from lit_attn.attention.spec import PRESETS
from lit_attn.checks.apart import Unavailable
from lit_attn.checks.comparison import (
    BF16,
    FLOAT32,
    FLOAT64,
    FP16,
    TF32,
    Case,
    LayerCheck,
    Precision,
    Shape,
    build_noisy_layer,
    check_layer,
    in_precision,
    make_arguments,
)
from lit_attn.tasks.tf32 import FIRST_CAPABILITY

OWN_SUMS = "sums"
"""Stands for the path of a similarity that computes its sums itself, as linear attention does."""

PATHS = (*(path.name for path in dispatch.Path), OWN_SUMS)
"""Names of everything that can compute a layer."""

SHAPES = (Shape(2, 33, 64, 4), Shape(1, 130, 128, 2))
"""Heads of width 16 and 64; lengths that no block of a kernel divides."""


class Selection(NamedTuple):
    """Choice of comparisons: the short form or all cases, of all presets or of `presets` alone.

    `parts` are the files of plug-ins, which the process of a check imports.
    """

    is_short: bool
    presets: tuple[str, ...] = ()
    parts: tuple[Path, ...] = ()


def list_precisions(device: torch.device) -> list[Precision]:
    """Return the precisions that the device supports."""
    if device.type != "cuda":
        return [FLOAT32, BF16, FP16]
    precisions = [FLOAT32]
    if torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY:
        precisions.append(TF32)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        precisions.append(BF16)
    return [*precisions, FP16]


def list_cases(device: torch.device, selection: Selection) -> list[Case]:
    """Return the comparisons of each preset.

    Presets that are named are compared in float64 too, in which no mistake is a rounding error.
    """
    precisions = list_precisions(device)
    cases = []
    if selection.presets:
        cases = [Case(FLOAT64, is_causal, SHAPES[0]) for is_causal in (False, True)]
    if selection.is_short:
        # Two precisions, each in one order: a compiled kernel takes seconds for every case.
        half = BF16 if BF16 in precisions else FP16
        return [*cases, Case(FLOAT32, True, SHAPES[0]), Case(half, False, SHAPES[0])]
    for precision in precisions:
        for is_causal in (False, True):
            cases += [Case(precision, is_causal, shape) for shape in SHAPES]
    return cases


def list_presets(selection: Selection, device: torch.device) -> list[str]:
    """Return the presets of `selection`: in its short form one for each kind of computation.

    That are the properties of a call, and the parts that turn products into weights.
    """
    if selection.presets:
        return list(selection.presets)
    if not selection.is_short:
        return list(PRESETS)
    by_kind: dict[str, str] = {}
    for name, spec in PRESETS.items():
        properties = read_properties(build_layer(name, SHAPES[0]).to(device), device, False)
        kinds = [spec.parts[family].kind for family in ("similarity", "bias", "normaliser")]
        by_kind.setdefault(f"{properties} {kinds}", name)
    return list(by_kind.values())


def build_layer(name: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Attention:
    """Return the layer of a preset in evaluation mode, with nonzero parameters."""
    return build_noisy_layer(name, shape.dim, shape.heads, dtype, qkv_bias=True)


def read_properties(
    layer: Attention, device: torch.device, is_causal: bool
) -> dict[str, Any] | None:
    """Return the properties from which `choose_path` chooses the layer's path, or None."""
    return read_case_properties(layer, device, Case(FLOAT32, is_causal, SHAPES[0]))


def read_case_properties(
    layer: Attention, device: torch.device, case: Case
) -> dict[str, Any] | None:
    """Return the properties from which `choose_path` chooses the path of `case`, or None."""
    batch, tokens = case.shape.batch, case.shape.tokens
    weight = layer.qkv.weight
    x = torch.zeros(batch, tokens, layer.qkv.in_features, device=device, dtype=weight.dtype)
    named = make_arguments(layer, case, device)
    mask, memory = named["attn_mask"], named["memory"]
    with torch.no_grad(), in_precision(case.precision, device):
        inputs = layer.inputs(x, mask, case.is_causal, None, memory=memory)
        return layer.similarity.describe_call(inputs)


def read_path(layer: Attention, device: torch.device, is_causal: bool = False) -> str:
    """Return the name of the path that the layer takes on the device."""
    return read_case_path(layer, device, Case(FLOAT32, is_causal, SHAPES[0]))


def read_case_path(layer: Attention, device: torch.device, case: Case) -> str:
    """Return the name of the path that the layer takes in `case`."""
    properties = read_case_properties(layer, device, case)
    if properties is None:
        return OWN_SUMS
    return dispatch.choose_path(**properties).name


def explain_path(layer: Attention, device: torch.device) -> str:
    """Return the properties that distinguish the layer from the standard layer, as `key=value`."""
    properties = read_properties(layer, device, False)
    if properties is None:
        return "its similarity needs no logits"
    standard = attn_layer("standard")(layer.qkv.in_features, layer.num_heads).to(device)
    usual = read_properties(standard, device, False)
    assert usual is not None
    reasons = [f"{key}={value}" for key, value in properties.items() if value != usual[key]]
    return ", ".join(reasons) or "softmax of dot products"


def check_path(
    path: str, device_name: str, selection: Selection, process: int, processes: int
) -> Iterator[LayerCheck]:
    """Yield the comparisons of the presets of `selection` that take `path` on the device.

    They are those of one of several processes, among which the presets are divided.
    """
    device = torch.device(device_name)
    require_device(device)
    # The process of a check has not imported them.
    load_presets(selection.parts)
    for name in list_presets(selection, device)[process::processes]:
        # PyTorch compiles one function a limited number of times, and then computes without a word
        # what it could not compile: another path.
        torch.compiler.reset()
        for case, layer in _build_layers(name, selection, device):
            if read_path(layer, device, case.is_causal) == path:
                yield check_layer(name, path, layer, case, device)


def list_paths(selection: Selection, device: torch.device) -> list[str]:
    """Return the paths that are checked: all of them, or those that the named presets take."""
    if not selection.presets:
        return list(PATHS)
    taken = set()
    for name in selection.presets:
        for case, layer in _build_layers(name, selection, device):
            taken.add(read_path(layer, device, case.is_causal))
    return [path for path in PATHS if path in taken]


def _build_layers(
    name: str, selection: Selection, device: torch.device
) -> Iterator[tuple[Case, Attention]]:
    """Yield the cases of a preset, each with its layer on the device."""
    for case in list_cases(device, selection):
        dtype = torch.float64 if case.precision is FLOAT64 else torch.float32
        yield case, build_layer(name, case.shape, dtype).to(device)


def require_device(device: torch.device) -> None:
    """Raise Unavailable if this process cannot use the device, which another one may occupy."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        raise Unavailable(f"{device.type} cannot be used: {line}") from error


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
    representatives = list_presets(Selection(is_short=True), device)
    cases_of = dict.fromkeys(representatives, cases)
    if device.type == "cuda":
        for name in list_presets(Selection(is_short=False), device):
            cases_of.setdefault(name, cases[-1:])
    for name in list(cases_of)[process::processes]:
        yield from _compare_compiled(name, cases_of[name], device)


def _compare_compiled(name: str, cases: list[Case], device: torch.device) -> Iterator[LayerCheck]:
    """Yield the comparison of the compiled layer of a preset in each case."""
    for case in cases:
        torch.compiler.reset()
        layer = build_layer(name, case.shape).to(device)
        path = read_path(layer, device, case.is_causal)
        layer.compile()
        yield check_layer(name, path, layer, case, device)
