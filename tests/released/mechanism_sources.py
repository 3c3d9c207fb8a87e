"""Released files of mechanisms, and the functions and classes that are loaded from them."""

import __future__

import ast
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


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
