"""Values and gradients of every preset in every precision, compared with the float64 reference.

An error is the norm of a difference over the norm of the reference, in multiples of the precision's
eps. Some gradients are sensitive: a change of the inputs by one eps changes them by many. Their
errors are multiples of this change. Half precisions are autocast, as in training. The layers of one
path are checked in a process of their own (lit_attn.doctor.apart), which can hang or crash without
ending the doctor.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_attn.attention import dispatch, path_record, reference
from lit_attn.attention.agreement import build_noisy_layer, differentiate, largest
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS
from lit_attn.doctor.apart import Unavailable
from lit_attn.schema.mistakes import describe_check_failure
from lit_attn.tasks.tf32 import FIRST_CAPABILITY, products_in_tf32

OWN_SUMS = "sums"
"""Stands for the path of a similarity that computes its sums itself, as linear attention does."""

PATHS = (*(path.name for path in dispatch.Path), OWN_SUMS)
"""Names of everything that can compute a layer."""

TOLERANCE = 30.0
"""Largest error of a value, or of a gradient, in multiples of the precision's eps."""

SMALL = 0.1
"""A gradient whose norm is below this share of the largest parameter's gradient is compared with
this share: a gradient that is exactly zero has no relative error."""


class Precision(NamedTuple):
    """Arithmetic of a training: the type of autocast or None, and the rounding error eps."""

    name: str
    autocast: torch.dtype | None
    eps: float


FLOAT32 = Precision("float32", None, torch.finfo(torch.float32).eps)
TF32 = Precision("tf32", None, 2.0**-10)
BF16 = Precision("bf16", torch.bfloat16, torch.finfo(torch.bfloat16).eps)
FP16 = Precision("fp16", torch.float16, torch.finfo(torch.float16).eps)


class Shape(NamedTuple):
    """Size of a layer and its input."""

    batch: int
    tokens: int
    dim: int
    heads: int


SHAPES = (Shape(2, 33, 64, 4), Shape(1, 130, 128, 2))
"""Heads of width 16 and 64; lengths that no block of a kernel divides."""


class Case(NamedTuple):
    """One comparison of one layer.

    `has_mask`: the last tokens of the first sample are padding. `is_cross`: keys and values come
    from other tokens.
    """

    precision: Precision
    is_causal: bool
    shape: Shape
    has_mask: bool = False
    is_cross: bool = False


class LayerCheck(NamedTuple):
    """Outcome of one comparison: errors in multiples of eps, or the text of an exception."""

    preset: str
    path: str
    precision: str
    is_causal: bool
    value_error: float
    gradient_error: float
    exception: str = ""

    @property
    def error(self) -> float:
        """Larger one of both errors; NaN if one is NaN."""
        return largest([self.value_error, self.gradient_error])

    @property
    def failure(self) -> str:
        """Why the comparison fails, or an empty text."""
        order = "causal" if self.is_causal else "not causal"
        where = f"{self.preset}, {self.precision}, {order}"
        if self.exception:
            return f"{where}: {self.exception}"
        for name, error in (("value", self.value_error), ("gradient", self.gradient_error)):
            if not math.isfinite(error):
                return f"{where}: the {name} is not a number"
            if error > TOLERANCE:
                return f"{where}: the {name} is off by {error:,.0f} eps (limit {TOLERANCE:.0f})"
        return ""


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


def list_cases(device: torch.device, is_short: bool) -> list[Case]:
    """Return the comparisons of each preset."""
    precisions = list_precisions(device)
    if is_short:
        # Two precisions, each in one order: a compiled kernel takes seconds for every case.
        half = BF16 if BF16 in precisions else FP16
        return [Case(FLOAT32, True, SHAPES[0]), Case(half, False, SHAPES[0])]
    cases = []
    for precision in precisions:
        for is_causal in (False, True):
            cases += [Case(precision, is_causal, shape) for shape in SHAPES]
    return cases


def list_presets(is_short: bool, device: torch.device) -> list[str]:
    """Return all presets, or in the short form one for each kind of computation.

    That are the properties of a call, and the parts that turn products into weights.
    """
    if not is_short:
        return list(PRESETS)
    by_kind: dict[str, str] = {}
    for name, spec in PRESETS.items():
        properties = read_properties(build_layer(name, SHAPES[0]).to(device), device, False)
        kinds = [spec.parts[family].kind for family in ("similarity", "bias", "normaliser")]
        by_kind.setdefault(f"{properties} {kinds}", name)
    return list(by_kind.values())


def build_layer(name: str, shape: Shape) -> Attention:
    """Return the float32 layer of a preset in evaluation mode, with nonzero parameters."""
    return build_noisy_layer(name, shape.dim, shape.heads, qkv_bias=True)


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
    x = torch.zeros(batch, tokens, layer.qkv.in_features, device=device)
    named = make_arguments(layer, case, device)
    mask, memory = named["attn_mask"], named["memory"]
    with torch.no_grad(), in_precision(case.precision, device):
        inputs = layer.inputs(x, mask, case.is_causal, None, memory=memory)
        return layer.similarity.describe_call(inputs)


def read_path(layer: Attention, device: torch.device, is_causal: bool = False) -> str:
    """Return the name of the path that the layer takes on the device, without refused ones."""
    return read_case_path(layer, device, Case(FLOAT32, is_causal, SHAPES[0]))


def read_case_path(layer: Attention, device: torch.device, case: Case) -> str:
    """Return the name of the path that the layer takes in `case`, without refused ones."""
    properties = read_case_properties(layer, device, case)
    if properties is None:
        return OWN_SUMS
    return dispatch.choose_usable_path(properties, device.type).name


def explain_path(layer: Attention, device: torch.device) -> str:
    """Return the properties that distinguish the layer from the standard layer, as `key=value`."""
    properties = read_properties(layer, device, False)
    if properties is None:
        return "its similarity needs no logits"
    standard = attn_layer("standard")(layer.qkv.in_features, layer.num_heads).to(device)
    usual = read_properties(standard, device, False)
    assert usual is not None
    reasons = [f"{key}={value}" for key, value in properties.items() if value != usual[key]]
    path = dispatch.choose_path(**properties).name
    if path in path_record.refused_paths(device.type):
        reasons.append(f"{path} refused")
    return ", ".join(reasons) or "softmax of dot products"


def check_path(
    path: str, device_name: str, is_short: bool, process: int, processes: int
) -> Iterator[LayerCheck]:
    """Yield the comparisons of all presets that take `path` on the device.

    They are those of one of several processes, among which the presets are divided. The record of
    an earlier doctor has no effect, or a refused path would never be used again.
    """
    device = torch.device(device_name)
    path_record.set_refused(device.type, {})
    require_device(device)
    for name in list_presets(is_short, device)[process::processes]:
        # PyTorch compiles one function a limited number of times, and then computes without a word
        # what it could not compile: another path.
        torch.compiler.reset()
        for case in list_cases(device, is_short):
            layer = build_layer(name, case.shape)
            if read_path(layer.to(device), device, case.is_causal) != path:
                continue
            yield check_layer(name, path, layer, case, device)


def require_device(device: torch.device) -> None:
    """Raise Unavailable if this process cannot use the device, which another one may occupy."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        raise Unavailable(f"{device.type} cannot be used: {line}") from error


def check_layer(
    name: str, path: str, layer: Attention, case: Case, device: torch.device
) -> LayerCheck:
    """Return the comparison of one layer with its reference."""
    x, direction = make_tokens(case.shape)
    parts = (name, path, case.precision.name, case.is_causal)
    eps = case.precision.eps
    expected = compute_reference(layer, x, direction, case)
    changed = compute_reference(layer, x, direction, case, noise=eps)
    units = [max(eps, change) for change in relative_errors(changed, expected)]
    try:
        actual = compute_layer(layer, x, direction, case, device)
    except torch.OutOfMemoryError as error:
        # Another program uses the memory of the GPU.
        raise Unavailable(f"{name}, {case.precision.name}: out of memory") from error
    except Exception as error:
        text = describe_check_failure(error)
        return LayerCheck(*parts, math.inf, math.inf, exception=text)
    errors = []
    for difference, unit in zip(relative_errors(actual, expected), units, strict=True):
        errors.append(difference / unit)
    # The first tensor is the output, and all others are gradients.
    return LayerCheck(*parts, errors[0], largest(errors[1:]))


def make_tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return an input and a direction of the gradient, both (B, n, d) in float32."""
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.tokens, shape.dim)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def make_arguments(layer: Attention, case: Case, device: torch.device | str) -> dict[str, Any]:
    """Return the arguments of the layer's call beside its tokens."""
    batch, tokens, dim, _ = case.shape
    mask = None
    if case.has_mask:
        mask = torch.ones(batch, 1, 1, tokens, dtype=torch.bool, device=device)
        mask[0, ..., -(tokens // 3) :] = False
    memory = None
    if case.is_cross:
        generator = torch.Generator().manual_seed(3)
        memory = torch.randn(batch, tokens, dim, generator=generator)
        memory = memory.to(device, layer.qkv.weight.dtype)
    return {"is_causal": case.is_causal, "attn_mask": mask, "memory": memory}


def compute_reference(
    layer: Attention, x: Tensor, direction: Tensor, case: Case, noise: float = 0.0
) -> list[Tensor]:
    """Return the output of the formulas and all its gradients, in float64 on the CPU.

    `noise` is the standard deviation of a relative change of the input and of all parameters.
    """
    exact = copy.deepcopy(layer).cpu().double()
    inputs = x.double()
    if noise:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for tensor in (inputs, *exact.parameters()):
                change = torch.randn(tensor.shape, dtype=torch.double, generator=generator)
                tensor.mul_(1 + noise * change)
    inputs.requires_grad_()
    out = reference.attention(exact, inputs, **make_arguments(exact, case, "cpu"))
    return differentiate(out, [inputs, *exact.parameters()], direction)


def compute_layer(
    layer: Attention, x: Tensor, direction: Tensor, case: Case, device: torch.device
) -> list[Tensor]:
    """Return the output of the layer on the device and all its gradients, in float64 on the CPU."""
    inputs = x.to(device).requires_grad_()
    named = make_arguments(layer, case, device)
    with in_precision(case.precision, device):
        out = layer(inputs, **named)
        results = differentiate(out, [inputs, *layer.parameters()], direction)
    return [tensor.cpu().double() for tensor in results]


@contextlib.contextmanager
def in_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute with the arithmetic of `precision`."""
    is_half = precision.autocast is not None
    autocast = torch.autocast(device.type, precision.autocast, enabled=is_half)
    with products_in_tf32(precision is TF32), autocast:
        yield


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the relative errors of the output, the input's gradient and the parameters' gradients.

    All tensors are in this order.
    """
    norms = [tensor.norm().item() for tensor in expected]
    smallest = SMALL * max(norms[2:])
    norms[2:] = [max(norm, smallest) for norm in norms[2:]]
    errors = []
    for one, other, norm in zip(actual, expected, norms, strict=True):
        errors.append((one - other).norm().item() / norm)
    return errors
