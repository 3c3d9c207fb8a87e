"""Record single layers of released code: `PYTHONPATH=tests:. python -m released.mechanisms FOLDER`.

FOLDER contains the files of `SOURCES` at their commits, each below a folder OWNER+NAME; the SHA-256
of each file is checked. A case is a mechanism: the released class or function computes the output
of a chain of layers, from parameters that are named and drawn as those of this project, and
autograd its gradients. Only numbers are stored. Where the released code computes a step in float32,
or calls a device or a kernel, the text of that step is replaced, and the replacement must match.
"""

import __future__

import ast
import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lit_attn.attention.layer import attn_layer
from lit_attn.attention.network import number_layers
from released.record import FOLDER, use_library
from released.recording import Arrays, Tensors, fill, generator

DIM, HEADS, WIDTH = 24, 6, 4
BATCH, TOKENS = 2, 20
SAMPLES = 200
"""Largest number of values of a tensor that a record keeps."""

DOUBLE = {".float()": ".double()", "torch.float32": "torch.float64"}


class Source(NamedTuple):
    """Released file: its repository, commit and licence, and the first digits of its SHA-256."""

    repository: str
    commit: str
    licence: str
    path: str
    digest: str

    def read(self, folder: Path) -> str:
        """Return the text below `folder`; raise SystemExit if it is another one."""
        file = folder / self.repository.replace("/", "+") / self.path
        content = file.read_bytes()
        if not hashlib.sha256(content).hexdigest().startswith(self.digest):
            raise SystemExit(f"{file}: differs from {self.commit} of {self.repository}")
        return content.decode()


GATED = "49645df63aafe9e680bc44a9c0ca280d4aefa8e9"
UNILM = "768a3c873f598bb9b4d4dfb9267b099e35f8fe56"
SIGMOID = "9273b493f234ccbb184cab1131010dd0e965d8ce"
MODELS = "src/transformers/models"
LAYERS = "attention_simulator/src/attention_simulator/layers"
SOURCES = {
    "gated": Source(
        "qiuzh20/gated_attention", GATED, "MIT", "modeling_qwen3.py", "49ff727cca160fb1"
    ),
    "gpt-oss": Source(
        "huggingface/transformers",
        "v5.23.0",
        "Apache-2.0",
        f"{MODELS}/gpt_oss/modeling_gpt_oss.py",
        "eb6e2d66fd2a34d3",
    ),
    "gemma-2": Source(
        "huggingface/transformers",
        "v5.23.0",
        "Apache-2.0",
        f"{MODELS}/gemma2/modeling_gemma2.py",
        "9d3ac67224d6f19e",
    ),
    "bloom": Source(
        "huggingface/transformers",
        "v5.23.0",
        "Apache-2.0",
        f"{MODELS}/bloom/modeling_bloom.py",
        "974fd0f5c497d605",
    ),
    "t5": Source(
        "huggingface/transformers",
        "v5.23.0",
        "Apache-2.0",
        f"{MODELS}/t5/modeling_t5.py",
        "41fe2c3fc41a2b86",
    ),
    "softpick": Source(
        "zaydzuhri/softpick-attention",
        "c97f4dc5f9fcec2e8afc2932db2cba6d7d7e5465",
        "not stated",
        "naive_softpick_attn.py",
        "52ef04871414fe48",
    ),
    "differential": Source(
        "microsoft/unilm",
        UNILM,
        "MIT",
        "Diff-Transformer/multihead_diffattn.py",
        "a49056a3227df073",
    ),
    "differential-norm": Source(
        "microsoft/unilm", UNILM, "MIT", "Diff-Transformer/rms_norm.py", "c7857f1f0348592c"
    ),
    "differential-2": Source(
        "microsoft/unilm",
        "31646c58ba06272ce1771bf07681751f0114abd0",
        "MIT",
        "Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py",
        "2f55992c6c9b1686",
    ),
    "ssmax": Source(
        "gdevos010/Scalable-Softmax",
        "108e969f50956b47f134e9712a0fa7bdf521718d",
        "MIT",
        "src/scalable_softmax.py",
        "795a2a0ab33c6bb2",
    ),
    "forgetting": Source(
        "fla-org/flash-linear-attention",
        "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89",
        "MIT",
        "fla/ops/forgetting_attn/naive.py",
        "4433d7c34d599e14",
    ),
    "sigmoid": Source(
        "apple/ml-sigmoid-attention", SIGMOID, "Apple", f"{LAYERS}/attention.py", "df4f8e98262d05f1"
    ),
    "sigmoid-function": Source(
        "apple/ml-sigmoid-attention",
        SIGMOID,
        "Apple",
        f"{LAYERS}/activations.py",
        "1f88b8989729227f",
    ),
    "value-residual": Source(
        "Zcchill/Value-Residual-Learning",
        "95652f64aba7db6c095f4e92eafb9e76e6ed9e02",
        "MIT",
        "src/modeling/modeling_llama_resformer.py",
        "ba2b508d667c4d2f",
    ),
    "selective": Source(
        "lucidrains/x-transformers",
        "9252ed7838021ee61e6c5be0930b3a9a88efdf06",
        "MIT",
        "x_transformers/attend.py",
        "f5f296ea13e640a3",
    ),
    "multi-token": Source(
        "facebookresearch/RAM",
        "e6f051fbcfaef4cab69bf2ea1b25f500f94c0c64",
        "MIT",
        "projects/mta/mta_transformer.py",
        "a34e6b36116e289b",
    ),
}


class Released:
    """Definitions of released files below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(
        self,
        source: str,
        names: Sequence[str],
        replacements: Mapping[str, str],
        globals_: Mapping[str, Any],
    ) -> SimpleNamespace:
        """Return the functions and classes `names` of a file, after `replacements` of its text.

        Nothing else of the file is executed, so its imports need not exist; `globals_` has the
        names that the definitions use. Decorators of the definitions are left out.
        """
        tree = ast.parse(SOURCES[source].read(self.folder))
        definitions = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                node.decorator_list = []
                definitions.append(node)
        text = "\n\n".join(ast.unparse(node) for node in definitions)
        for old, new in replacements.items():
            if old not in text:
                raise SystemExit(f"{SOURCES[source].path}: {old!r} does not occur")
            text = text.replace(old, new)
        space = {"torch": torch, "nn": nn, "F": F, "math": math, **globals_}
        flags = __future__.annotations.compiler_flag
        exec(compile(text, SOURCES[source].path, "exec", flags, dont_inherit=True), space)
        return SimpleNamespace(**{name: space[name] for name in names})


class Case(NamedTuple):
    """Mechanism, and the released layer: `compute(released, x, parameters, layer)`, without skip.

    `parameters` are those of one layer, named as in this project. `tolerance` is the largest
    difference, relative to the largest value of a tensor.
    """

    attention: Any
    source: str
    compute: Callable[[Released, Tensor, Tensors, int], Tensor]
    depth: int = 1
    is_causal: bool = True
    tolerance: float = 1e-10


def build(case: Case, seed: int = 0) -> nn.ModuleList:
    """Return this project's layers of a case, in float64, with the shared initial values."""
    layer_class = attn_layer(case.attention)
    layers = [
        layer_class(DIM, HEADS, qkv_bias=False, proj_bias=False).double().eval()
        for _ in range(case.depth)
    ]
    chain = nn.ModuleList(layers)
    number_layers(chain)
    fill(chain, seed)
    return chain


def inputs() -> tuple[Tensor, Tensor]:
    """Return the input of a chain, and the weights of its outputs in the loss."""
    size = (BATCH, TOKENS, DIM)
    x, weights = (generator("mechanisms", name).standard_normal(size) for name in ("x", "loss"))
    return torch.from_numpy(x), torch.from_numpy(weights)


def record_chain(
    layers: Sequence[Callable[[Tensor], Tensor]], parameters: Mapping[str, Tensor]
) -> Arrays:
    """Return the output of layers with skip connections, and all gradients, as arrays."""
    x, weights = inputs()
    x.requires_grad_()
    out = x
    for layer in layers:
        out = out + layer(out)
    gradients = torch.autograd.grad((out * weights).sum(), [x, *parameters.values()])
    arrays = {"out": sample(out.detach())}
    for name, gradient in zip(["x", *parameters], gradients, strict=True):
        arrays[f"gradient {name}"] = sample(gradient)
    return arrays


def sample(values: Tensor) -> Any:
    """Return at most SAMPLES values, spaced by an odd number, so that no column is left out."""
    step = math.ceil(values.numel() / SAMPLES) | 1
    return values.flatten()[::step].numpy()


def replay(case: Case) -> Arrays:
    """Return the record of this project's layers."""
    chain = build(case)
    parameters = dict(chain.named_parameters())

    def call(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: cast(Tensor, layer(x, is_causal=case.is_causal))

    return record_chain([call(layer) for layer in chain], parameters)


def record_case(case: Case, released: Released) -> Arrays:
    """Return the record of the released layers."""
    parameters = dict(build(case).named_parameters())

    def call(number: int) -> Callable[[Tensor], Tensor]:
        prefix = f"{number}."
        own = {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}
        return lambda x: case.compute(released, x, own, number)

    return record_chain([call(number) for number in range(case.depth)], parameters)


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
    """Attention of the configuration files; a softmax that is changed in place is copied."""
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
    arguments = SimpleNamespace(
        use_mta=True,
        query_kernel_size=queries,
        key_kernel_size=keys,
        pre_sm_linear_head=True,
        after_sm_query_kernel_size=queries,
        after_sm_key_kernel_size=keys,
        head_kernel_size=p["filter.weight_heads"].shape[-1],
        post_sm_linear_head=False,
        pad_key="both",
        init_method="identity",
        group_norm=True,
        add_gating=True,
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
        "wpsm.weight": p["filter.logit_heads"],
        "mta_kernel_after_sm": p["filter.weight_kernel"].unsqueeze(1),
        "head_kernel": p["filter.weight_heads"].mT,
        "subln.weight": p["filter.norm"],
        "gate.weight": p["filter.gate.weight"],
        "gate.bias": p["filter.gate.bias"],
    }
    return cast(Tensor, functional_call(module, state, (x, torch.zeros(TOKENS))))


T5: dict[str, Any] = {"bias": {"kind": "t5", "buckets": 8, "max_distance": 16}}
GROUPED: dict[str, Any] = {"preset": "multi-token", "filter": {"group": 3, "queries": 3, "keys": 5}}
CASES = {
    "gated": Case("gated", "gated", gated),
    "gated-heads": Case("gated-heads", "gated", gated),
    "sink": Case("sink", "gpt-oss", eager("gpt-oss", {})),
    "off-by-one": Case("off-by-one", "gpt-oss", eager("gpt-oss", {})),
    "capped": Case(
        {"normaliser": {"kind": "capped-softmax", "cap": 1.0}},
        "gemma-2",
        eager("gemma-2", {"torch.float32": "torch.float64"}, softcap=1.0),
    ),
    "alibi": Case("alibi", "bloom", alibi),
    "t5": Case(T5, "t5", t5_encoder, is_causal=False),
    # The released code differentiates the largest logit too, by which its epsilon of 1e-8 scales.
    "softpick": Case("softpick", "softpick", softpick, tolerance=1e-7),
    "differential": Case("differential", "differential", differential, depth=2),
    "ssmax": Case("ssmax", "ssmax", ssmax, is_causal=False),
    "forgetting": Case("forgetting", "forgetting", forgetting),
    "sigmoid": Case("sigmoid", "sigmoid", sigmoid, is_causal=False),
    "value-residual": Case("value-residual", "value-residual", value_residual, depth=3),
    "selective": Case("selective", "selective", selective),
    "differential-2": Case("differential-2", "differential-2", differential_2),
    "multi-token": Case(GROUPED, "multi-token", multi_token),
}
"""The recorded mechanisms, by the name of the preset."""

RECORDS = FOLDER / "mechanisms.npz"


def main(folder: str) -> None:
    """Write the records of all cases, with the origin of each, as one npz file."""
    released = Released(Path(folder))
    arrays: Arrays = {}
    for name, case in CASES.items():
        source = SOURCES[case.source]
        origin = [source.repository, source.commit, source.licence, source.path]
        arrays[f"{name}/origin"] = np.array(origin)
        for key, array in record_case(case, released).items():
            arrays[f"{name}/{key}"] = array
        print(name)
    np.savez_compressed(RECORDS, **arrays)  # type: ignore


if __name__ == "__main__":
    main(*sys.argv[1:])
