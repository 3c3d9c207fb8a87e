"""Layers of released code: each function computes one layer from parameters of this project.

`x` is the input (B, n, d), `p` has the parameters of this project's layer by name, and `number` is
the place of the layer in its chain. Where the released code computes a step in float32, or calls a
device or a kernel, the text of that step is replaced, and the replacement must match.
"""

import math
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from released.mechanism_sources import Released
from released.record import use_library
from released.recording import Tensors

DIM, HEADS, WIDTH = 24, 6, 4
BATCH, TOKENS = 2, 20
DOUBLE = {".float()": ".double()", "torch.float32": "torch.float64"}


def by_head(x: Tensor) -> Tensor:
    """Return (B, H, n, D) from (B, n, H D)."""
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def project(x: Tensor, p: Tensors) -> list[Tensor]:
    """Return q, k and v, (B, H, n, D) each."""
    return [by_head(part) for part in F.linear(x, p["qkv.weight"]).chunk(3, -1)]


def finish(heads: Tensor, p: Tensors) -> Tensor:
    """Return the output from heads (B, n, H, D)."""
    return F.linear(heads.flatten(-2), p["proj.weight"])


def order_mask() -> Tensor:
    """Return the additive causal mask (n, n)."""
    return torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.double).triu(1)


def unrotated() -> tuple[Tensor, Tensor]:
    """Return cosines and sines of angles of 0."""
    ones = torch.ones(BATCH, TOKENS, WIDTH, dtype=torch.double)
    return ones, torch.zeros_like(ones)


def attend(logits: Tensor, v: Tensor) -> Tensor:
    """Return the heads (B, n, H, D) of causal logits by a softmax."""
    return ((logits + order_mask()).softmax(-1) @ v).transpose(1, 2)


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(WIDTH)


LLAMA = ("rotate_half", "apply_rotary_pos_emb", "repeat_kv")


SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH,
    "max_position_embeddings": TOKENS,
    "rope_theta": 1.0,
    "attention_dropout": 0.0,
    "attention_bias": False,
    "qkv_bias": False,
    "use_qk_norm": False,
    "pretraining_tp": 1,
}


def gated(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """Qwen3Attention: each head's rows of W_q, and then those of its gate."""
    gates = p["gate.linear.weight"].unflatten(0, (HEADS, -1))
    is_of_heads = gates.shape[1] == 1
    code = released.load(
        "gated",
        ("Qwen3Attention", *LLAMA),
        {"torch.float32": "torch.float64"},
        {"Qwen3RotaryEmbedding": lambda config: None},
    )
    choices = {
        "headwise_attn_output_gate": is_of_heads,
        "elementwise_attn_output_gate": not is_of_heads,
    }
    module = code.Qwen3Attention(SimpleNamespace(**SIZES, **choices), number)
    q, k, v = p["qkv.weight"].chunk(3)
    rows = torch.cat([q.unflatten(0, (HEADS, -1)), gates], 1).flatten(0, 1)
    weights = {"q_proj": rows, "k_proj": k, "v_proj": v, "o_proj": p["proj.weight"]}
    named = {"attention_mask": order_mask()[None, None], "position_embeddings": unrotated()}
    state = {f"{name}.weight": weight for name, weight in weights.items()}
    return cast(Tensor, functional_call(module, state, (x,), named)[0])


def eager(source: str, replacements: Mapping[str, str], **options: Any) -> Any:
    """Return `compute` for an `eager_attention_forward` of transformers."""

    def compute(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
        names = ("eager_attention_forward", "repeat_kv")
        code = released.load(source, names, replacements, {})
        sinks = p.get("normaliser.logit", torch.zeros(HEADS, dtype=torch.double))
        module = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
        q, k, v = project(x, p)
        mask = order_mask()[None, None]
        out = code.eager_attention_forward(module, q, k, v, mask, scaling=WIDTH**-0.5, **options)
        return finish(out[0], p)

    return compute


def alibi(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """Bloom's bias, which differs from ALiBi's by one number for each query."""
    names = ("build_alibi_tensor", "_get_alibi_slopes")
    code = released.load("bloom", names, {}, {})
    present = torch.ones(BATCH, TOKENS, dtype=torch.long)
    bias = code.build_alibi_tensor(present, HEADS, torch.double)
    q, k, v = project(x, p)
    return finish(attend(scaled(q, k) + bias.view(BATCH, HEADS, 1, TOKENS), v), p)


def t5_encoder(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """Buckets of T5Attention for an encoder, with this project's factor of the logits."""
    code = released.load("t5", ("T5Attention",), {}, {})
    position = torch.arange(TOKENS)
    relative = position[None, :] - position[:, None]
    buckets = code.T5Attention._relative_position_bucket(
        relative, bidirectional=True, num_buckets=8, max_distance=16
    )
    q, k, v = project(x, p)
    bias = p["bias.table"][buckets].permute(2, 0, 1)
    heads = (scaled(q, k) + bias).softmax(-1) @ v
    return finish(heads.transpose(1, 2), p)


def softpick(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    rearrange = use_einops().rearrange
    names = ("naive_softpick_attn", "softpick")
    code = released.load("softpick", names, {".float()": ".double()"}, {"rearrange": rearrange})
    out, _ = code.naive_softpick_attn(*project(x, p), head_first=True)
    return finish(out.transpose(1, 2), p)


def use_einops() -> Any:
    """Return the library that some released code needs."""
    if "einops" not in sys.modules:
        use_library("einops", "einops==0.8.1")
    return sys.modules["einops"]


def differential(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    norm = released.load("differential-norm", ("RMSNorm",), {".float()": ".double()"}, {})
    code = released.load(
        "differential",
        ("MultiheadDiffAttn", "repeat_kv", "lambda_init_fn"),
        DOUBLE,
        {"RMSNorm": norm.RMSNorm, "apply_rotary_emb": lambda q, interleaved: q},
    )
    module = code.MultiheadDiffAttn(DIM, number, HEADS // 2)
    q, k, v = p["qkv.weight"].chunk(3)
    q1, q2, k1, k2 = p["normaliser.vectors"]
    state = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "out_proj.weight": p["proj.weight"],
        "lambda_q1": q1,
        "lambda_q2": q2,
        "lambda_k1": k1,
        "lambda_k2": k2,
        "subln.weight": p["normaliser.weight"],
    }
    return cast(Tensor, functional_call(module, state, (x, ())))


def differential_2(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """MultiheadFlashDiffV2, with PyTorch's attention in the place of FlashAttention."""

    def attend_in_order(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        keys, values = (part.repeat_interleave(2, 2).transpose(1, 2) for part in (k, v))
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=causal)
        return heads.transpose(1, 2)

    code = released.load(
        "differential-2",
        ("MultiheadFlashDiffV2", "diff_func"),
        {},
        {"flash_attn_func": attend_in_order, "apply_rotary_emb": lambda q, interleaved: q},
    )
    module = code.MultiheadFlashDiffV2(True, DIM, HEADS, None, WIDTH)
    q, k, v = p["qkv.weight"].chunk(3)
    both = [q.unflatten(0, (HEADS, -1)), p["pair.projection.weight"].unflatten(0, (HEADS, -1))]
    state = {
        "q_proj.weight": torch.stack(both, 1).flatten(0, 2),
        "k_proj.weight": k,
        "v_proj.weight": v,
        "o_proj.weight": p["proj.weight"],
        "lambda_proj.weight": p["pair.factor.weight"],
    }
    return cast(Tensor, functional_call(module, state, (x, ())))


def ssmax(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """The released module has one factor, so it is called for each head; no causal order."""
    module = released.load("ssmax", ("ScalableSoftmax",), {}, {}).ScalableSoftmax()
    q, k, v = project(x, p)
    logits = scaled(q, k)
    weights = []
    for head, factor in enumerate(p["scale.strength"]):
        weights.append(functional_call(module, {"s": factor}, (logits[:, head],)))
    heads = torch.stack(weights, 1) @ v
    return finish(heads.transpose(1, 2), p)


def forgetting(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    einops = use_einops()
    code = released.load(
        "forgetting",
        ("naive_forgetting_attn",),
        {".float()": ".double()"},
        {"rearrange": einops.rearrange, "repeat": einops.repeat},
    )
    q, k, v = (part.transpose(1, 2) for part in project(x, p))
    gates = F.logsigmoid(F.linear(x, p["bias.gate.weight"], p["bias.gate.bias"]))
    return finish(code.naive_forgetting_attn(q, k, v, gates), p)


def sigmoid(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """Attention of the simulator with the bias -log n of the paper; no causal order."""
    function = "unnormalized_sigmoid_attention"
    activations = released.load("sigmoid-function", (function,), {}, {})
    code = released.load("sigmoid", ("Attention",), {}, {})
    module = code.Attention(DIM, getattr(activations, function), HEADS)
    state = {
        "qkv.weight": p["qkv.weight"],
        "proj.weight": p["proj.weight"],
        "attn_bias": torch.tensor([-math.log(TOKENS)], dtype=torch.double),
        "attn_temp": torch.zeros(1, dtype=torch.double),
    }
    return cast(Tensor, functional_call(module, state, (x,))["attn_proj"])


FIRST_VALUES: list[Tensor] = []
"""The list that the released model passes from layer to layer."""


def value_residual(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    if number == 0:
        FIRST_VALUES.clear()
    code = released.load(
        "value-residual",
        ("LlamaAttention", *LLAMA),
        {"torch.float32": "torch.float64"},
        {"LlamaRotaryEmbedding": lambda config: None},
    )
    module = code.LlamaAttention(SimpleNamespace(**SIZES), number)
    q, k, v = p["qkv.weight"].chunk(3)
    weights = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": p["proj.weight"]}
    state = {f"{name}.weight": weight for name, weight in weights.items()}
    named = {
        "attention_mask": order_mask()[None, None],
        "formal_layer_values": FIRST_VALUES,
        "position_embeddings": unrotated(),
    }
    return cast(Tensor, functional_call(module, state, (x,), named)[0])


def selective(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    einops = use_einops()
    code = released.load(
        "selective",
        ("selective_attn", "exists", "default"),
        {},
        {"rearrange": einops.rearrange},
    )
    q, k, v = project(x, p)
    hidden = order_mask().isinf()
    logits = scaled(q, k).masked_fill(hidden, -torch.finfo(torch.double).max)
    return finish((code.selective_attn(logits).softmax(-1) @ v).transpose(1, 2), p)


def multi_token(released: Released, x: Tensor, p: Tensors, number: int) -> Tensor:
    """Attention of the configuration files; a softmax that is changed in place is copied.

    The configuration file of the toy task has only the kernel of the logits.
    """
    code = released.load(
        "multi-token",
        ("Attention", "RMSNorm"),
        {
            ".float()": ".double()",
            "'cuda'": "'cpu'",
            "(att_type='soft')(scores).type_as(xq)": "(att_type='soft')(scores).clone()",
        },
        {
            "apply_rotary_emb": lambda q, k, dim, angles: (q, k),
            "repeat_kv": lambda x, count, dim: x,
        },
    )
    _, queries, keys = p["filter.logit_kernel"].shape
    is_toy = "filter.weight_kernel" not in p
    arguments = SimpleNamespace(
        use_mta=True,
        query_kernel_size=queries,
        key_kernel_size=keys,
        pre_sm_linear_head=not is_toy,
        after_sm_query_kernel_size=None if is_toy else queries,
        after_sm_key_kernel_size=None if is_toy else keys,
        head_kernel_size=None if is_toy else p["filter.weight_heads"].shape[-1],
        post_sm_linear_head=False,
        pad_key="both",
        init_method="identity",
        group_norm=not is_toy,
        add_gating=not is_toy,
        gate_1d=True,
        layer_norm_rescale=False,
    )
    module = code.Attention(DIM, WIDTH, HEADS, HEADS, 1.0, False, TOKENS, arguments, 0.0, number)
    q, k, v = p["qkv.weight"].chunk(3)
    state = {
        "wq.weight": q,
        "wk.weight": k,
        "wv.weight": v,
        "wo.weight": p["proj.weight"],
        "mta_kernel": p["filter.logit_kernel"].unsqueeze(1),
    }
    if not is_toy:
        state |= {
            "wpsm.weight": p["filter.logit_heads"],
            "mta_kernel_after_sm": p["filter.weight_kernel"].unsqueeze(1),
            "head_kernel": p["filter.weight_heads"].mT,
            "subln.weight": p["filter.norm"],
            "gate.weight": p["filter.gate.weight"],
            "gate.bias": p["filter.gate.bias"],
        }
    return cast(Tensor, functional_call(module, state, (x, torch.zeros(TOKENS))))
