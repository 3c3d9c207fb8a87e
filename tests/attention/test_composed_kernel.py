"""The kernels for compositions: their formulas, their results, and when they are chosen."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers import composed_by_tiles
from helpers.attention_checks import assert_same, make, tokens
from helpers.fake_gpu import H100, Capability, rehearsal
from helpers.paths import ROOT
from torch import Tensor

from lit_attn.attention.compose import Matrices
from lit_attn.attention.dispatch import Path, choose_usable_path
from lit_attn.attention.kernels import composed
from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import PRESETS, attention_spec

N = 13
COMPOSED = [name for name, spec in PRESETS.items() if spec.compose.places()]


def attend_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    before: Matrices,
    after: Matrices,
    visibility: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return the result of `composed.attend` by the formulas of its tiles."""
    batch, heads, n = q.shape[:3]
    keys = k.shape[2]
    visible = torch.ones(n, keys, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if visibility is not None:
        visible = visible & visibility
    visible = visible.expand(batch, heads, n, keys)
    matrices = []
    for of_all, length in (
        (before.query, n),
        (before.key, keys),
        (after.query, n),
        (after.key, keys),
    ):
        of_tokens = None if of_all is None else of_all.expand(batch, length, heads, heads)
        matrices.append(of_tokens)
    out: Tensor = composed_by_tiles.Tiled.apply(q, k, v, *matrices, visible, scale)
    return out


@pytest.fixture
def _by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers that ask for the kernel compute its formulas tile by tile on a CPU."""
    monkeypatch.setattr(composed, "supports", lambda *arguments: True)
    monkeypatch.setattr(composed, "attend", attend_by_tiles)


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.usefixtures("_by_tiles")
def test_tiles_have_the_values_and_gradients_of_the_formulas(name: str) -> None:
    layer = make(PRESETS[name])
    layer.composes_in_kernel = True
    assert path_of(layer, tokens(N)) == Path.COMPOSED.name
    assert_same(layer, tokens(N), is_causal=True)
    lengths = torch.tensor([N, N - 5])
    padding = (torch.arange(N) < lengths.unsqueeze(1)).view(2, 1, 1, N)
    assert_same(layer, tokens(N), attn_mask=padding)
    # Each head has its mask, and no query of one head sees a key.
    of_heads = padding & (torch.rand(2, 4, N, N, generator=torch.Generator().manual_seed(3)) > 0.3)
    of_heads[:, 1] = False
    assert_same(layer, tokens(N), attn_mask=of_heads)


@pytest.mark.slow
@pytest.mark.process
def test_kernels_in_the_interpreter_have_the_values_and_gradients_of_the_formulas() -> None:
    # Triton is a dependency of PyTorch on Linux alone.
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "helpers.composed_interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def path_of(layer: Attention, x: Tensor) -> str:
    """Return the path of a causal call of a layer."""
    properties = layer.similarity.describe_call(layer.inputs(x, None, True, None))
    assert properties is not None
    return choose_usable_path(properties, x.device.type).name


def path_on_gpu(
    choice: Any, dim: int = 64, heads: int = 4, gpu: Capability = H100, **options: Any
) -> str:
    """Return the path of a layer that asks for the kernel, on a simulated GPU."""
    with rehearsal(gpu):
        layer = attn_layer(attention_spec(choice, "test"))(dim, heads, device="cuda", **options)
        layer.composes_in_kernel = True
        return path_of(layer, torch.zeros(1, 2, dim, device="cuda", dtype=layer.proj.weight.dtype))


@pytest.mark.parametrize("name", COMPOSED)
def test_every_composition_of_heads_has_a_kernel(name: str) -> None:
    assert path_on_gpu(name) == Path.COMPOSED.name


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ({"compose": "static", "window": 4}, {}),
        ({"compose": "static", "similarity": "mixture"}, {}),
        ({"compose": "static", "similarity": "gaussian"}, {}),
        ({"compose": "static", "normaliser": "sigmoid"}, {}),
        ({"compose": "static", "bias": "alibi"}, {}),
        ({"compose": "static", "filter": "selective"}, {}),
        ("dcmha", {"dim": 17 * 64, "heads": 17}),
        ("dcmha", {"dim": 4 * 72, "heads": 4}),
        ("dcmha", {"dtype": torch.float64}),
        ("dcmha", {"attn_drop": 0.1}),
    ],
    ids=str,
)
def test_other_layers_form_their_weights(choice: Any, options: dict[str, Any]) -> None:
    assert path_on_gpu(choice, **options) == Path.FORMED.name


@pytest.mark.parametrize(
    ("gpu", "dtype", "path"),
    [
        ((8, 0), torch.bfloat16, Path.COMPOSED),
        ((8, 0), torch.float32, Path.FORMED),
        ((8, 6), torch.bfloat16, Path.FORMED),
        ((7, 5), torch.float16, Path.FORMED),
    ],
    ids=str,
)
def test_a_gpu_without_the_memory_of_a_program_forms_its_weights(
    gpu: Capability, dtype: torch.dtype, path: Path
) -> None:
    assert path_on_gpu("dcmha", gpu=gpu, dtype=dtype) == path.name


def test_kernel_is_used_on_request_only() -> None:
    with rehearsal():
        layer = attn_layer("dcmha")(64, 4, device="cuda")
        assert path_of(layer, torch.zeros(1, 2, 64, device="cuda")) == Path.FORMED.name


def test_a_cpu_has_no_kernel() -> None:
    layer = attn_layer("dcmha")(64, 4)
    layer.composes_in_kernel = True
    assert path_of(layer, torch.zeros(1, 2, 64)) == Path.FORMED.name
