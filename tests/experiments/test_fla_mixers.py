"""KDA, DeltaProduct, RWKV-7, PaTH, log-linear Mamba-2 and NSA of flash-linear-attention.

Their kernels need a GPU. On a CPU, fla's own layers run here with fla's naive forms in the place of
the kernels, and are compared with the recurrence of the paper in float64.
"""

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fla_mixers import DIM, WIDTH, attention, count_projections, fla_layers
from helpers.recurrences import (
    HEADS,
    convolved,
    gated_delta,
    join_heads,
    read_delta_parts,
    read_qkv,
    recurrence,
    rms_normed,
    split_heads,
)
from torch import Tensor
from torch.nn import functional as F

from lit_attn.attention.layer import attn_layer

TOKENS = 20

NAMES = ["KDA", "DeltaProduct", "RWKV7", "PaTH", "LogLinearMamba2"]

every_layer = pytest.mark.parametrize("name", NAMES)

# fla and Triton warn of the machine and of their own code.
pytestmark = pytest.mark.filterwarnings("default")


def test_parameters_are_those_of_the_papers() -> None:
    """Projections, low-rank projections (through 32 numbers), short convolutions and numbers."""
    squares = DIM * DIM
    convolutions = 3 * 4 * DIM
    low_rank = 2 * DIM * WIDTH
    inner, state = 2 * DIM, 64
    levels = fla_layers.LogLinearMamba2(DIM, HEADS).layer.num_lambda_dims
    loglinear_inputs = DIM * (2 * inner + 2 * state + HEADS * (levels + 1))
    loglinear_biases = 2 * inner + 2 * state + HEADS * (levels + 1) + DIM
    expected = {
        "KDA": 4 * squares
        + convolutions
        + 2 * low_rank
        + DIM * HEADS
        + (DIM + DIM + HEADS + WIDTH),
        "DeltaProduct": 7 * squares + 5 * 4 * DIM + 3 * DIM * HEADS + 2 * HEADS + WIDTH,
        "PaTH": 4 * squares + 2 * DIM * 32 + 3 * DIM + DIM * HEADS + HEADS,
        "LogLinearMamba2": loglinear_inputs
        + loglinear_biases
        + 4 * (inner + 2 * state)
        + inner * DIM
        + HEADS * (3 + levels)
        + inner,
    }
    for name, count in expected.items():
        layer = getattr(fla_layers, name)(DIM, HEADS)
        assert sum(parameter.numel() for parameter in layer.parameters()) == count, name


@pytest.mark.parametrize("name", ["KDA", "DeltaProduct", "RWKV7"])
def test_declared_flops_are_those_of_the_products(name: str) -> None:
    """Sizes (m, k, n) of the products of a chunk of 64 keys in each head."""
    chunk, key, value = 64, WIDTH, WIDTH
    layer = getattr(fla_layers, name)(DIM, HEADS).to("meta").requires_grad_(False)
    of_query = [(chunk, key, value), (chunk, key, chunk), (chunk, chunk, value)]
    of_key = [(chunk, key, value), (key, chunk, value)]
    of_key += [(chunk, key, chunk), (chunk, chunk, key), (chunk, chunk, value)]
    counts = {"KDA": (1, 1), "DeltaProduct": (1, 2), "RWKV7": (1, 1)}
    queries, keys = counts[name]
    products = queries * of_query + keys * of_key
    if name == "RWKV7":
        # b^T u beside k^T v, two more products of queries and keys, and two weighted sums.
        products += [(key, chunk, value), *[(chunk, key, chunk)] * 2, *[(chunk, chunk, value)] * 2]
    expected = count_projections(layer, chunk)
    for rows, inner, columns in products:
        expected += HEADS * 2 * rows * inner * columns
    expected += keys * HEADS * chunk * (chunk * chunk // 3)
    assert layer.flops(chunk) == expected
    assert layer.flops(2 * chunk) == 2 * expected


def test_flops_of_layers_that_compare_pairs_grow_with_their_number() -> None:
    path = fla_layers.PaTH(DIM, HEADS)
    pairs = [path.flops(n) / n for n in (128, 256)]
    # 2 products with D numbers of each further token, and D^2 of each further chunk.
    assert pairs[1] - pairs[0] == 128 * HEADS * 4 * WIDTH + 2 * HEADS * 2 * WIDTH**2
    log_linear = fla_layers.LogLinearMamba2(DIM, HEADS)
    layer = log_linear.layer
    states = [log_linear.flops(n) / n for n in (128, 256)]
    assert states[1] - states[0] == HEADS * 2 * layer.ssm_state_size * layer.head_dim


def test_nsa_needs_sixteen_heads_of_each_key_head() -> None:
    layer = fla_layers.NSA(128, 16)
    assert layer.layer.num_kv_heads == 1
    assert layer.layer.window_size == 0
    # 4 blocks, 128 keys of them and no window: fewer than 16 blocks of 64 keys.
    attended = 128 * 16 * (2 + 128) * 4 * 8
    on_meta = layer.to("meta").requires_grad_(False)
    assert layer.flops(128) == count_projections(on_meta, 128) + attended
    with pytest.raises(
        ValueError, match=r"NSA needs 16, 32, 64, \.\.\. heads of each key head, not"
    ):
        attn_layer(attention("NSA"))(DIM, HEADS)
    with pytest.raises(ValueError, match="NSA with a window needs the package flash_attn"):
        attn_layer(attention("NSA", window_size=64))(128, 16)


# The recurrences of the papers, with the weights of fla's layers.


def kda(layer: Any, x: Tensor) -> Tensor:
    q, k, v, beta = read_delta_parts(layer, x)
    steps = split_heads(F.softplus(layer.f_proj(x) + layer.dt_bias))
    decay = (-layer.A_log.exp()[:, None, None] * steps).exp()
    normed = rms_normed(recurrence(q, k, v, decay, beta), layer.o_norm)
    return layer.o_proj(join_heads(normed) * layer.g_proj(x).sigmoid())


def delta_product(layer: Any, x: Tensor) -> Tensor:
    q, keys, values = read_qkv(layer, x)
    q = F.normalize(split_heads(q), dim=-1) * layer.head_k_dim**-0.5
    # Two keys and values of a token, in the order in which they are written.
    keys, values = (part.unflatten(-1, (2, HEADS, -1)) for part in (keys, values))
    keys = F.normalize(keys, dim=-1)
    beta = 2 * layer.b_proj(x).sigmoid().unflatten(-1, (2, HEADS))
    decay = (-layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)).exp()
    state = q.new_zeros(len(x), HEADS, layer.head_k_dim, layer.head_v_dim)
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state
        for number in range(2):
            k, v = keys[:, t, number], values[:, t, number]
            predicted = torch.einsum("bhk,bhkv->bhv", k, state)
            written = beta[:, t, number].unsqueeze(-1) * (v - predicted)
            state = state + torch.einsum("bhk,bhv->bhkv", k, written)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    normed = rms_normed(torch.stack(outputs, 2), layer.o_norm)
    return layer.o_proj(join_heads(normed) * F.silu(layer.g_proj(x)))


def rwkv7(layer: Any, x: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, 0))[:, :-1]
    mixed = {name: x + (before - x) * getattr(layer, f"x_{name}") for name in "rwkvag"}
    r, k, v = (layer.r_proj(mixed["r"]), layer.k_proj(mixed["k"]), layer.v_proj(mixed["v"]))
    log_decay = -math.exp(-0.5) * layer.w_lora(mixed["w"]).sigmoid()
    a = layer.a_lora(mixed["a"]).sigmoid()
    removed = F.normalize(split_heads(k * layer.k_k), dim=-1)
    k = k * (1 + (a - 1) * layer.k_a)
    r, k, v, a, decay = (split_heads(part) for part in (r, k, v, a, log_decay.exp()))
    state = k.new_zeros(len(x), HEADS, WIDTH, WIDTH)
    outputs = []
    for t in range(x.shape[1]):
        kept = torch.einsum("bhk,bhkv->bhv", removed[:, :, t], state)
        state = decay[:, :, t].unsqueeze(-1) * state
        state = state - torch.einsum("bhk,bhv->bhkv", (a * removed)[:, :, t], kept)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, :, t], state))
    output = torch.stack(outputs, 2)
    centred = output - output.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + layer.g_norm.eps).rsqrt()
    normed = join_heads(normed) * layer.g_norm.weight + layer.g_norm.bias
    bonus = (r * k * layer.r_k.unsqueeze(1)).sum(-1, keepdim=True) * v
    return layer.o_proj((normed + join_heads(bonus)) * layer.g_lora(mixed["g"]))


def path(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (split_heads(getattr(layer, f"{name}_proj")(x)) for name in "qkv")
    w = F.normalize(split_heads(convolved(layer.w_proj(x), layer.w_conv1d)), dim=-1)
    beta = 2 * split_heads(layer.bt_proj(x)).sigmoid()
    n = x.shape[1]
    logits = q.new_full((len(x), HEADS, n, n), -torch.inf)
    for i in range(n):
        turned_q = q[:, :, i]
        for j in range(i, -1, -1):
            logits[:, :, i, j] = (turned_q * k[:, :, j]).sum(-1) * WIDTH**-0.5
            along = (turned_q * w[:, :, j]).sum(-1, keepdim=True)
            turned_q = turned_q - beta[:, :, j] * along * w[:, :, j]
    return layer.o_proj(join_heads(logits.softmax(-1) @ v))


def log_linear(layer: Any, x: Tensor) -> Tensor:
    inner, state, levels = layer.intermediate_size, layer.ssm_state_size, layer.num_lambda_dims
    sizes = [inner, inner + 2 * state, HEADS, HEADS * levels]
    gate, inputs, dt, scales = layer.in_proj(x).split(sizes, -1)
    values, b, c = convolved(inputs, layer.conv1d).split([inner, state, state], -1)
    steps = split_heads(F.softplus(dt + layer.dt_bias))
    values = split_heads(values)
    log_decay = -layer.A_log.exp()[:, None] * steps.squeeze(-1)
    total = log_decay.cumsum(-1)
    weights = F.softplus(layer.L[:, None] * split_heads(scales))
    output = torch.zeros_like(values)
    for i in range(x.shape[1]):
        # The tokens before i, in spans of powers of 2: one for each bit of i.
        spans = [(0, i, i + 1)]
        for level in range(1, levels):
            half = 1 << (level - 1)
            if i & half:
                end = i - i % half
                spans.append((level, end - half, end))
        for level, first, last in spans:
            decay = (total[:, :, i, None] - total[:, :, first:last]).exp()
            similarity = torch.einsum("bs,bjs->bj", c[:, i], b[:, first:last]).unsqueeze(1)
            weight = weights[:, :, i, level, None] * decay * similarity
            written = steps[:, :, first:last] * values[:, :, first:last]
            output[:, :, i] += torch.einsum("bhj,bhjv->bhv", weight, written)
    output = output + layer.D[:, None, None] * values
    gated = join_heads(output) * F.silu(gate)
    return layer.out_proj(rms_normed(gated, layer.norm))


REFERENCES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "GatedDeltaNet": gated_delta,
    "KDA": kda,
    "DeltaProduct": delta_product,
    "RWKV7": rwkv7,
    "PaTH": path,
    "LogLinearMamba2": log_linear,
}


# fla's naive forms in the place of its kernels.


def naive(name: str) -> Any:
    return importlib.import_module(f"fla.ops.{name}.naive")


def naive_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    steps = F.softplus(g + options["dt_bias"].view(HEADS, -1))
    decay = -options["A_log"].exp().view(HEADS, 1) * steps
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return naive("kda").naive_recurrent_kda(q, k, v, decay, beta.sigmoid())


def naive_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    decay = -options["A_log"].exp() * F.softplus(g + options["dt_bias"])
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    form = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
    return form(q, k, v, beta.sigmoid(), decay)


def naive_convolution(x: Tensor, weight: Tensor, **_: Any) -> Any:
    channels, width = weight.shape
    padded = F.pad(x.mT, (width - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=channels).mT), None


def naive_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return naive("gated_delta_product").naive_recurrent_gated_delta_product(
        q, k, v, g, beta, scale=q.shape[-1] ** -0.5, num_householder=options["num_householder"]
    )


def naive_rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    parts = [part.transpose(1, 2) for part in (r * r.shape[-1] ** 0.5, k, v, a, b, w)]
    output, state = naive("generalized_delta_rule.dplr").dplr_recurrence(*parts)
    return output.transpose(1, 2), state


def naive_path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, **_: Any) -> Any:
    gates = torch.zeros_like(beta)
    scale = q.shape[-1] ** -0.5
    return naive("path_attn").naive_path_attn(q, k, v, w, beta, gates, scale, 16), None


def naive_log_linear(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Any:
    form = naive("log_linear_attn").naive_log_linear_attn
    return form(q, k, v, g, options["level_scales"], options["scale"]), None


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set fla's naive forms, and PyTorch's functions for norms, shifts and convolutions."""
    layers = {
        "kda": {"chunk_kda": naive_kda},
        "gated_deltanet": {
            "chunk_gated_delta_rule": naive_delta,
            "causal_conv1d": naive_convolution,
        },
        "gated_deltaproduct": {"chunk_gated_delta_product": naive_product},
        "path_attn": {
            "parallel_path_attn": naive_path,
            "l2_norm": lambda w, output_dtype: F.normalize(w, dim=-1),
        },
        "log_linear_mamba2": {"chunk_log_linear_attn": naive_log_linear},
        "rwkv7": {
            "chunk_rwkv7": naive_rwkv7,
            "token_shift": lambda x, *_, **__: (F.pad(x, (0, 0, 1, 0))[:, :-1] - x, None),
            "fused_addcmul_rwkv7": lambda x, delta, *shares: [
                x + delta * share for share in shares
            ],
            "fused_k_rwkv7": lambda k, a, scale: k + k * (a - 1) * scale,
            "gate_output_correction": importlib.import_module(
                "fla.ops.rwkv7.gate_output_correction"
            ).gate_output_correction_ref,
        },
    }
    for name, functions in layers.items():
        module = importlib.import_module(f"fla.layers.{name}")
        for function, stand_in in functions.items():
            monkeypatch.setattr(module, function, stand_in)
    modules = importlib.import_module("fla.modules")
    monkeypatch.setattr(
        modules.ShortConvolution, "forward", lambda self, x, **_: (convolved(x, self), None)
    )

    def norm_and_gate(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        activate = torch.sigmoid if self.activation == "sigmoid" else F.silu
        return rms_normed(x, self) * activate(gate)

    monkeypatch.setattr(modules.FusedRMSNormGated, "forward", norm_and_gate)
    gated = importlib.import_module("fla.modules.layernorm_gated").RMSNormGated
    monkeypatch.setattr(gated, "forward", lambda self, x, gate: rms_normed(x * F.silu(gate), self))


@pytest.mark.parametrize("name", REFERENCES)
def test_layers_with_naive_kernels_compute_the_recurrence(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_kernels(monkeypatch)
    torch.manual_seed(0)
    layer = getattr(fla_layers, name)(DIM, HEADS).layer.eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            # Zeros and ones would hide a part of the layer.
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(2, TOKENS, DIM)
    if name == "LogLinearMamba2":
        # Its `forward` refuses a CPU.
        layer.causal_conv1d_fn = lambda x, weight, bias, activation: (
            convolved(x, layer.conv1d),
            None,
        )
        layer.backend = "triton"
        output = layer.cuda_kernels_forward(x)[0]
    else:
        output = layer(x)[0]
    expected = REFERENCES[name](layer.double(), x.double())
    assert expected.std() > 0.01
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@every_layer
def test_layers_compute_the_recurrence_of_the_paper(name: str) -> None:
    torch.manual_seed(0)
    layer = getattr(fla_layers, name)(DIM, HEADS).cuda()
    x = torch.randn(2, 150, DIM, device="cuda")
    output = layer(x).detach().cpu().double()
    with torch.no_grad():
        expected = REFERENCES[name](layer.layer.cpu().double(), x.cpu().double())
    error = (output - expected).abs().max() / expected.abs().max()
    assert error < 0.04, float(error)
