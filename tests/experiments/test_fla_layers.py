"""Tests of the layers of flash-linear-attention in experiments/token_mixers (docs/mixers.md).

Their kernels need a GPU. On a CPU, the layers are built, counted and refused.
"""

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import studies
from helpers.commands import run_python
from helpers.fla_mixers import DIM, PLUG_IN, WIDTH, attention, count_projections, fla_layers
from helpers.recurrences import (
    HEADS,
    convolved,
    gated_delta,
    join_heads,
    read_delta_parts,
    recurrence,
    rms_normed,
    split_heads,
    turned,
)
from helpers.stopping import stop_at
from helpers.training_cells import digits_cell, folder_of, result_of, text_cell
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.ablate.dry_run import find_warnings
from lit_attn.ablate.plan import expand
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.mixer import TokenMixer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.cells.failure import Preempted
from lit_attn.cells.rows import read_metrics
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies
from lit_attn.models import factory
from lit_attn.models.own_trial import MixerTrial, Use, try_gpu_mixers
from lit_attn.schema.errors import ConfigError
from lit_attn.train import run_cell
from lit_attn.training.first_step import Mistake, find_mistake

TOKENS = 150

NAMES = ["GatedLinearAttention", "RetNet", "DeltaNet", "GatedDeltaNet", "Mamba2"]

every_layer = pytest.mark.parametrize("name", NAMES)

# fla and Triton warn of the machine and of their own code.
may_warn = pytest.mark.filterwarnings("default")


def cell_of(*names: str, **training: Any) -> Cell:
    """Return a cell of a small language model whose layers are of these classes."""
    return text_cell(
        data={"context": 80, "accumulate": 1},
        model={"dim": DIM, "attention": {"layers": [attention(name) for name in names]}},
        training={"accelerator": "auto", **training},
    )


def use_of(name: str, is_causal: bool = True) -> Use:
    spec = AttentionSpec.model_validate(attention(name))
    return Use(spec, DIM, HEADS, TOKENS, is_causal, has_padding=False)


OTHERS = ["KDA", "DeltaProduct", "RWKV7", "PaTH", "LogLinearMamba2"]
"""Layers whose computation test_fla_mixers.py has."""


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_layers_are_built_with_the_width_and_the_heads(name: str) -> None:
    mixer = attn_layer(attention(name))(DIM, HEADS)
    assert isinstance(mixer, TokenMixer)
    assert mixer.needs_gpu
    assert mixer.is_causal_only
    layer = mixer.layer.layer
    assert (layer.hidden_size, layer.num_heads) == (DIM, HEADS)
    with pytest.raises(ValueError, match=f"fla_layers:{name} needs a GPU, but its tokens are on"):
        mixer(torch.randn(1, 4, DIM), is_causal=True)
    mixer.set_depth(3)
    assert layer.layer_idx == (0 if name == "RWKV7" else 3)
    with torch.device("meta"):
        on_meta = attn_layer(attention(name))(DIM, HEADS)
    x = torch.empty(2, TOKENS, DIM, device="meta")
    assert on_meta(x, is_causal=True).shape == x.shape


def test_parameters_are_those_of_the_papers() -> None:
    """Projections of q, k, v, gate and output, short convolutions, norms and gates."""
    squares = DIM * DIM
    convolutions = 3 * 4 * DIM
    inner, state = 2 * DIM, 64
    mamba_inputs = DIM * (2 * inner + 2 * state + HEADS)
    expected = {
        "GatedLinearAttention": 4 * squares + DIM * 16 + 16 * DIM // 2 + DIM // 2 + WIDTH,
        "RetNet": 8 * squares + 2 * WIDTH,
        "DeltaNet": 4 * squares + convolutions + DIM * HEADS + WIDTH,
        "GatedDeltaNet": 5 * squares + convolutions + 2 * DIM * HEADS + 2 * HEADS + WIDTH,
        "Mamba2": mamba_inputs + 5 * (inner + 2 * state) + 3 * HEADS + inner + inner * DIM,
    }
    for name, count in expected.items():
        layer = getattr(fla_layers, name)(DIM, HEADS)
        assert sum(parameter.numel() for parameter in layer.parameters()) == count, name


def test_arguments_reach_the_layer_of_fla() -> None:
    layer = fla_layers.GatedDeltaNet(DIM, HEADS, expand_v=2, use_gate=False)
    assert layer.layer.head_v_dim == 2 * WIDTH
    with pytest.raises(ValueError, match=r"fla_layers.py:\d+: AssertionError: .*num_heads of 3"):
        attn_layer(attention("RetNet"))(DIM, 3)


def test_numbers_of_each_head_have_no_weight_decay() -> None:
    layer = fla_layers.GatedDeltaNet(DIM, HEADS)
    for same in (layer, copy.deepcopy(layer)):
        assert same.no_weight_decay() == {"layer.A_log", "layer.dt_bias"}
    assert fla_layers.RetNet(DIM, HEADS).no_weight_decay() == set()


def products_of(name: str, chunk: int) -> list[tuple[int, int, int]]:
    """Return the sizes (m, k, n) of the products of a chunk of `chunk` tokens in each head."""
    layer = getattr(fla_layers, name)(DIM, HEADS).layer
    if name == "Mamba2":
        state, value = layer.ssm_state_size, layer.head_dim
        return [(chunk, chunk, value), (chunk, state, value), (state, chunk, value)]
    key, value = layer.head_k_dim, layer.head_v_dim
    products = [
        (chunk, key, value),  # q S
        (key, chunk, value),  # k^T v, or k^T u
        (chunk, key, chunk),  # q k^T
        (chunk, chunk, value),  # weights times v or u
    ]
    if name in ("DeltaNet", "GatedDeltaNet"):
        products += [
            (chunk, key, value),  # w S
            (chunk, key, chunk),  # k k^T
            (chunk, chunk, key),  # w
            (chunk, chunk, value),  # u
        ]
    return products


@every_layer
def test_declared_flops_are_those_of_the_products(name: str) -> None:
    chunk = 64
    layer = getattr(fla_layers, name)(DIM, HEADS).to("meta").requires_grad_(False)
    expected = count_projections(layer, chunk)
    for rows, inner, columns in products_of(name, chunk):
        expected += HEADS * 2 * rows * inner * columns
    if name == "Mamba2":
        # All heads share B and C.
        expected += 2 * chunk * chunk * layer.layer.ssm_state_size
    if name in ("DeltaNet", "GatedDeltaNet"):
        expected += HEADS * chunk * (chunk * chunk // 3)
    assert layer.flops(chunk) == expected
    assert layer.flops(2 * chunk) == 2 * expected


def test_a_model_with_the_layers_is_counted() -> None:
    experiment = cell_of("GatedDeltaNet", "RetNet").experiment
    costs = factory.describe(experiment.model, experiment.data)
    assert costs.parameters > 0
    assert costs.flops > fla_layers.RetNet(DIM, HEADS).flops(80)


def test_a_machine_without_a_gpu_refuses_the_layer_in_one_line() -> None:
    cell = cell_of("RetNet", "RetNet")
    message = (
        "model: attention: fla_layers:RetNet needs a GPU, but this cell trains on the CPU; "
        "nothing was tried"
    )
    signature = cell.experiment.data.signature()
    with pytest.raises(ConfigError) as caught:
        try_gpu_mixers(cell.experiment.model, signature, "32-true", torch.device("cpu"))
    assert str(caught.value) == message
    if not torch.cuda.is_available():
        written = cell.model_dump(mode="json", by_alias=True)
        assert find_mistake([written]) == Mistake(0, message)
        # The machine that submits jobs needs no GPU.
        assert find_mistake([written], has_data=False) is None


def test_a_cpu_is_refused_when_the_configuration_is_read() -> None:
    with pytest.raises(ValueError, match=r"training.accelerator: fla_layers:RetNet needs a GPU"):
        cell_of("RetNet", "RetNet", accelerator="cpu")


def test_models_without_causal_order_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"RetNet \(.*\): is causal only, but this model does not use"
    ):
        MixerTrial(use_of("RetNet", is_causal=False)).run("fp32")


def write_study(folder: Path) -> Path:
    """Write a study whose second variant has a layer that needs a GPU."""
    body = f"""
parts: ["{PLUG_IN}"]
baseline: a
cells:
  a: {{}}
  b: {{attention: {{kind: module, import: "fla_layers:RetNet"}}}}
"""
    return studies.write(folder, body)


def test_a_dry_run_names_the_layers_that_nothing_tried(tmp_path: Path) -> None:
    source = read_studies(write_study(tmp_path))["tiny"]
    assert find_warnings(expand(source, tmp_path / "runs")) == [
        "b: attention: fla_layers:RetNet needs a GPU; nothing was tried"
    ]


@pytest.mark.process
def test_a_run_without_a_gpu_trains_no_cell(tmp_path: Path) -> None:
    """The runner names the variant, also if another one could train."""
    path = write_study(tmp_path)
    finished = run_python(tmp_path, "-m", "lit_attn.ablate", str(path))
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert "variant 'b': model: attention: fla_layers:RetNet needs a GPU" in finished.stderr
    assert not list(tmp_path.rglob("result.json"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.layers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs fla.*pip install 'lit_attn\[fla\]'"):
        attn_layer(attention("RetNet"))(DIM, HEADS)


# The recurrences of the papers, with the weights of fla's layers.


def gla(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (
        split_heads(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    decay = split_heads(F.logsigmoid(layer.gk_proj(x)) / 16).exp()
    output = rms_normed(recurrence(q, k, v, decay, None), layer.g_norm_swish_gate)
    return layer.o_proj(join_heads(output) * F.silu(layer.g_proj(x)))


def retention(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (
        split_heads(projection(x)) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    constants = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.double))
    decay = constants[:, None, None].expand(len(x), HEADS, x.shape[1], 1)
    output = recurrence(turned(q), turned(k), v, decay, None)
    normed = rms_normed(output, layer.g_norm_swish_gate)
    return layer.o_proj(join_heads(normed) * F.silu(layer.g_proj(x)))


def delta(layer: Any, x: Tensor) -> Tensor:
    q, k, v, beta = read_delta_parts(layer, x)
    output = recurrence(q, k, v, torch.ones_like(beta), beta)
    return layer.o_proj(join_heads(rms_normed(output, layer.o_norm)))


def mamba(layer: Any, x: Tensor) -> Tensor:
    inner, state = layer.intermediate_size, layer.ssm_state_size
    gate, inputs, dt = layer.in_proj(x).split([inner, inner + 2 * state, HEADS], -1)
    values, b, c = convolved(inputs, layer.conv1d).split([inner, state, state], -1)
    steps = split_heads(F.softplus(dt + layer.dt_bias))
    decay = (-layer.A_log.exp()[:, None, None] * steps).exp()
    b, c = (part.unsqueeze(1).expand(-1, HEADS, -1, -1) for part in (b, c))
    output = recurrence(c, b, steps * split_heads(values), decay, None) * state**0.5
    joined = join_heads(output + layer.D[:, None, None] * split_heads(values))
    gated = joined * F.silu(gate)
    return layer.out_proj(gated if layer.norm is None else rms_normed(gated, layer.norm))


REFERENCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "GatedLinearAttention": gla,
    "RetNet": retention,
    "DeltaNet": delta,
    "GatedDeltaNet": gated_delta,
    "Mamba2": mamba,
}


def reference_of(layer: Any, name: str, x: Tensor) -> Tensor:
    """Return the output of the recurrence in float64 on the CPU."""
    with torch.no_grad():
        return REFERENCES[name](layer.layer.cpu().double(), x.cpu().double())


def test_mamba_computes_the_recurrence() -> None:
    """Only its norm and SiLU are kernels: with PyTorch's SiLU and no norm, it runs on a CPU."""
    torch.manual_seed(0)
    layer = fla_layers.Mamba2(DIM, HEADS, rmsnorm=False, state_size=4, chunk_size=16)
    layer.layer.act = nn.SiLU()
    x = torch.randn(2, 40, DIM)
    output = layer(x)
    torch.testing.assert_close(
        output.double(), reference_of(layer, "Mamba2", x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
@may_warn
@every_layer
def test_layers_compute_the_recurrence_of_the_paper(name: str) -> None:
    """For 40 and 150 tokens, because fla has other kernels for at most 64 tokens."""
    torch.manual_seed(0)
    layer = getattr(fla_layers, name)(DIM, HEADS).cuda()
    x = torch.randn(2, TOKENS, DIM, device="cuda")
    with torch.no_grad():
        outputs = {tokens: layer(x[:, :tokens]).cpu().double() for tokens in (40, TOKENS)}
    # With gradients, fla chooses other kernels for short sequences.
    outputs[41] = layer(x[:, :41]).detach().cpu().double()
    expected = reference_of(layer, name, x)
    # Products in bfloat16, or in TF32.
    tolerance = 0.04 if name in ("DeltaNet", "GatedDeltaNet") else 0.01
    for tokens, output in outputs.items():
        error = (output - expected[:, :tokens]).abs().max() / expected.abs().max()
        assert error < tolerance, (tokens, float(error))


@pytest.mark.gpu
@may_warn
@every_layer
@pytest.mark.parametrize("tokens", [32, 150])
def test_layers_pass_the_trial(name: str, tokens: int) -> None:
    """Causal order, samples, gradients, and training in bfloat16."""
    with torch.device("cuda"):
        MixerTrial(use_of(name)._replace(tokens=tokens)).run("bf16")


@pytest.mark.gpu
@may_warn
@pytest.mark.parametrize(("precision", "compiled"), [("fp32", "none"), ("bf16", "blocks")])
def test_a_cell_trains_on_a_gpu_and_resumes(
    precision: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton may choose other kernels in the second attempt, so losses differ in rounding."""
    training = {"precision": precision, "compile": compiled}
    folders = []
    for name, stops in (("complete", ()), ("stopped", (5,))):
        parent = tmp_path / name
        parent.mkdir()
        cell = cell_of("GatedDeltaNet", "GatedLinearAttention", **training)
        folder = folder_of(cell.model_copy(update={"parts": (PLUG_IN,)}), parent)
        for step in stops:
            with monkeypatch.context() as patch:
                stop_at(patch, step)
                with pytest.raises(Preempted):
                    run_cell(folder)
        run_cell(folder)
        folders.append(folder)
    first, second = (result_of(folder) for folder in folders)
    assert first.device == torch.cuda.get_device_name()
    assert first.flops > 0
    assert first.steps == second.steps == 12
    rows, resumed_rows = (read_metrics(folder / "metrics.csv") for folder in folders)
    losses = [row for row in rows if row.name.endswith("/loss")]
    resumed_losses = [row for row in resumed_rows if row.name.endswith("/loss")]
    assert losses
    for row, resumed in zip(losses, resumed_losses, strict=True):
        assert row._replace(value=0) == resumed._replace(value=0)
        assert resumed.value == pytest.approx(row.value, rel=0.02)


@pytest.mark.gpu
@may_warn
def test_causal_order_is_required_on_a_gpu() -> None:
    """The check before the first cell accepts a language model, and refuses a ViT."""
    cells = [
        cell_of("RetNet", "RetNet"),
        digits_cell(
            model={"dim": DIM, "attention": attention("RetNet")}, training={"accelerator": "auto"}
        ),
    ]
    mistake = find_mistake([cell.model_dump(mode="json", by_alias=True) for cell in cells])
    assert mistake is not None
    number, message = mistake.number, mistake.message
    assert number == 1
    assert re.match(r"attention: fla_layers:RetNet \(.*\): is causal only", message)
