"""The WikiText-103 language model of transformer-mgk, and experiments/wikitext103_mgk.

The script is train.py itself with its own reader of columns, in float64 on a CPU, with dropout, a
narrower model, a smaller vocabulary and a shorter schedule. Positions stay in float32. The last
segment of each pass over the text is shorter than the others. The released layer ignores
--update_mode and always trains smgk-hard; for the case mgk, one more replacement passes the option
on to its attention. The sums of mlk, which the released code computes on a GPU only, are the
recorder's. `evaluation` is the perplexity per word of a validation and a test text, by the released
script eval_sliding_window.py with the options of its README.
"""

import contextlib
import json
import math
import pdb
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.paths import EXPERIMENTS

from lit_attn.schema.plugins import load_parts
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, generator, rename, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "minhtannguyen/transformer-mgk", "73608b3"
EXPERIMENT = "experiments/wikitext103_mgk/experiment.yaml"
RECIPE = EXPERIMENTS / "wikitext103_mgk"
PLUG_INS = [RECIPE / "transformer_xl_schedule.py", RECIPE / "reversed_positions.py"]
TOLERANCES = {
    "loss": 1e-11,
    "gradient": 1e-9,
    "change": 1e-7,
    "sample": 1e-7,
    "evaluation": 1e-9,
}
STEPS, WARMUP, BATCH, CONTEXT, VOCABULARY, CUTOFFS = 24, 6, 3, 10, 100, [30, 50, 80]
WIDTH, DEPTH, HEADS, HEAD_WIDTH, FFN = 16, 2, 2, 8, 32

# The released options and this project's `attention`, by case.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "softmax": (["--attn_type", "2"], {"preset": "standard"}),
    "smgk-hard": (
        ["--attn_type", "200", "--update_mode", "soft"],
        {
            "preset": "smgk-hard",
            "similarity": {"variance": [1, 0.3333333333333333], "shift_init": "released"},
        },
    ),
    "mgk": (
        ["--attn_type", "200", "--update_mode", "rbf2keys"],
        {
            "preset": "mgk",
            "similarity": {
                "variance": [1, 0.3333333333333333],
                "prior": "clamped",
                "prior_scope": "position",
                "positions": CONTEXT,
            },
            "normaliser": "offset-softmax",
        },
    ),
    "linear": (
        ["--attn_type", "4"],
        {"preset": "linear"},
    ),
    "mlk": (
        ["--attn_type", "400", "--update_mode", "rbf2keys"],
        {
            "preset": "mlk",
            "similarity": {
                "prior": "clamped",
                "prior_scope": "position",
                "positions": 256,
                "features": "sum-to-one",
                "divide_by": "scaled-sum",
            },
        },
    ),
}
RUNS = ["softmax-0", "softmax-1", "smgk-hard-0", "mgk-0", "linear-0", "mlk-0"]


def tokens(seed: int) -> np.ndarray:
    """Return a text that BATCH columns cut into segments; half of the steps is one pass.

    The last segment of a pass has half the length of the others.
    """
    column = STEPS // 2 * CONTEXT - CONTEXT // 2 + 1
    return generator("tokens", seed).integers(VOCABULARY, size=BATCH * column, dtype=np.int64)


def causal_sum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
    """Return the sums over j <= i of (q_i . k_j) v_j; the released function needs a GPU."""
    return (q @ k.mT).tril() @ v


def record(clone: Clone, run: str) -> Arrays:
    """Train one case and return the record."""
    case, _, number = run.rpartition("-")
    seed = int(number)
    replacements: dict[str, str] = {}
    if case == "mgk":
        kept = "self.dec_attn = attn_func(n_head, d_model, d_head, dropout, **kwargs)\n"
        passed = kept.replace("**kwargs", "update_mode=update_mode, **kwargs")
        follows = "        self.pos_ff = PositionwiseFF(\n            d_model, d_inner, dropout, "
        follows += "pre_lnorm=kwargs.get('pre_lnorm'))\n        self.attn_type = attn_type\n"
        replacements[kept + follows] = passed + follows
    torch.set_default_dtype(torch.float64)
    folder = "language-modeling/lmtool-fwms/src"
    sys.path.insert(0, str(clone.folder / folder))
    # Imported by the released code, not used by these cases, and compiled for a GPU.
    for name in ("fast_weight", "cuda_fast_weight_layer", "fast_fast_weight", "fast_transformers"):
        stub = ModuleType(f"utils.{name}")
        stub.__getattr__ = lambda _: None  # type: ignore
        sys.modules[f"utils.{name}"] = stub
    sys.modules["utils.fast_transformers"].fast_weight_sum = causal_sum  # type: ignore
    torch.version.cuda = torch.version.cuda or "12.0"
    reader = clone.load("data_utils", f"{folder}/data_utils.py", {})
    clone.load(
        "mem_transformer",
        f"{folder}/mem_transformer.py",
        {
            "inv_freq = 1 / (10000 ** (torch.arange(0.0, demb, 2.0) / demb))": (
                "inv_freq = 1 / (10000 ** (torch.arange(0.0, demb, 2.0, dtype=torch.float32)"
                " / demb))"
            ),
            "sinusoid_inp = torch.ger(pos_seq, self.inv_freq)": (
                "sinusoid_inp = torch.ger(pos_seq.to(torch.float32), self.inv_freq)"
            ),
            **{
                f"self.pi{key} = nn.Parameter(0.5 * torch.ones(self.n_head, 1, 1, 256), "
                "requires_grad= True)\n": f"self.pi{key} = nn.Parameter(0.5 * "
                f"torch.ones(self.n_head, 1, 1, {CONTEXT}))\n"
                for key in (0, 1)
            },
            **replacements,
        },
    )
    recorder = Recorder()

    def iterator(_: str, batch: int, context: int, **options: Any) -> Any:
        text = torch.from_numpy(tokens(seed))
        return reader.LMOrderedIterator(text, batch, context, **options)

    sizes = ["--n_layer", DEPTH, "--d_model", WIDTH, "--n_head", HEADS, "--d_head", HEAD_WIDTH]
    sizes += ["--d_inner", FFN, "--tgt_len", CONTEXT, "--eval_tgt_len", CONTEXT]
    sizes += ["--batch_size", BATCH, "--warmup_step", WARMUP, "--max_step", STEPS]
    # The other options are those of the released script.sh.
    options = ["--adaptive", "--dropout", "0.1", "--dropatt", "0.0", "--optim", "adam"]
    options += ["--lr", "0.00025", "--mem_len", "0", *map(str, sizes), *CASES[case][0]]
    with (
        patch.object(sys, "argv", ["", "--debug", *options]),
        # The released softmax attention stops in the debugger.
        patch.object(pdb, "set_trace", lambda: None),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        recorder,
        shared_draws(seed, time_first=True),
        contextlib.suppress(SystemExit),
    ):
        clone.run(
            f"{folder}/train.py",
            {
                "from data_utils import get_lm_corpus\n": "",
                "cutoffs = [20000, 40000, 200000]": f"cutoffs = {CUTOFFS}",
                "    para_model = model.to(device)\n\n\n# optimizer": (
                    "    para_model = PREPARE(model.to(device))\n\n\n# optimizer"
                ),
                "# Load the best saved model.\n": "raise SystemExit\n",
            },
            {
                "get_lm_corpus": lambda *_: SimpleNamespace(
                    vocab=range(VOCABULARY), get_iterator=iterator
                ),
                "PREPARE": recorder.start_from(seed),
            },
        )
    assert recorder.network is not None
    evaluation = evaluate(clone, reader, recorder.network, seed)
    return recorder.arrays() | {"evaluation": evaluation}


def evaluate(clone: Clone, reader: ModuleType, network: Any, seed: int) -> np.ndarray:
    """Return the perplexities per word of both splits by the released sliding window."""
    splits = {"valid": torch.from_numpy(tokens(seed)), "test": torch.from_numpy(tokens(seed + 1))}
    perplexities: list[float] = []

    def iterator(split: str, *sizes: int, sliding_window: bool, **options: Any) -> Any:
        assert sliding_window
        return reader.LMSlidingWindowIterator(splits[split], *sizes, **options)

    # The options of the README, in the recorded size.
    options = ["--batch_size", 1, "--tgt_len", CONTEXT, "--mem_len", 0, "--clamp_len", CONTEXT]
    with (
        patch.object(sys, "argv", ["", "--work_dir", ".", "--no_log", *map(str, options)]),
        patch.object(pdb, "set_trace", lambda: None),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        clone.run(
            "language-modeling/lmtool-fwms/src/eval_sliding_window.py",
            {
                "from data_utils import get_lm_corpus\n": "",
                "with open(os.path.join(args.work_dir, 'model.pt'), 'rb') as f:\n": "if True:\n",
                "    print(f'Loading checkpoint from: {f.name}')\n": "",
                "model = torch.load(f)": "model = MODEL",
                "def format_log(loss, split):\n": "NOTE(valid_loss, test_loss)\n\n"
                "def format_log(loss, split):\n",
            },
            {
                "get_lm_corpus": lambda *_: SimpleNamespace(
                    vocab=range(VOCABULARY), get_iterator=iterator
                ),
                "MODEL": network,
                "NOTE": lambda *losses: perplexities.extend(map(math.exp, losses)),
            },
        )
    return np.array(perplexities)


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk, with its own token reader."""
    case, _, number = run.rpartition("-")
    for split in ("train", "val", "test"):
        text = tokens(int(number) + (split == "test"))
        text.astype(np.uint16).tofile(folder / f"{split}.bin")
    words = {"kind": "words", "size": VOCABULARY}
    meta = {"vocabulary": VOCABULARY, "tokenizer": words, "dtype": "uint16"}
    (folder / "meta.json").write_text(json.dumps(meta))
    load_parts(PLUG_INS)
    cell = shipped_cell(
        EXPERIMENT.removeprefix("experiments/"),
        {
            "data.folder": str(folder),
            "data.tokenizer": words,
            "data.context": CONTEXT,
            "data.batch_size": BATCH,
            "data.epoch_steps": STEPS,
            "model.dim": WIDTH,
            "model.depth": DEPTH,
            "model.heads": HEADS,
            "model.head_dim": HEAD_WIDTH,
            "model.ffn.width": FFN,
            "model.cutoffs": CUTOFFS,
            "model.attention": CASES[case][1],
            "schedule.warmup": WARMUP / STEPS,
            "training.epochs": 1,
            "training.evaluate_every": 1,
            "training.precision": "fp32",
        },
        int(number),
    )
    metrics = ("val/perplexity", "test/perplexity")
    return Replay(cell, None, released_names, draws=True, metrics=metrics)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters; columns of rarer words stand in reversed order there."""
    renamed = rename(
        ours,
        [
            ("trunk.tokens.", "word_emb.emb_layers.0."),
            ("trunk.blocks.", "layers."),
            (".norm1.", ".dec_attn.layer_norm."),
            (".norm2.", ".pos_ff.layer_norm."),
            (".attn.proj.", ".dec_attn.o_net."),
            (".ffn.up.", ".pos_ff.CoreNet.0."),
            (".ffn.down.", ".pos_ff.CoreNet.3."),
            ("head.classes.", "crit.cluster_"),
        ],
    )
    # The heads of linear keys have their q, k and v side by side there; its weights pi are (H, n).
    is_mlk = any(t.shape[-1] == 256 for n, t in ours.items() if n.endswith(".prior"))
    renamed["crit.out_layers.0.bias"] = renamed.pop("head.bias")
    for part in ("weight", "bias"):
        renamed[f"crit.cluster_{part}"] = renamed[f"crit.cluster_{part}"].flip(0)
    for name in [name for name in renamed if name.endswith(".attn.qkv.weight")]:
        layer = name.removesuffix(".attn.qkv.weight")
        q, k, v = renamed.pop(name).chunk(3)
        second = renamed.pop(f"{layer}.attn.similarity.more.weight", k[:0])
        if is_mlk:
            heads = [part.unflatten(0, (HEADS, -1)) for part in (q, k, second, v)]
            renamed[f"{layer}.dec_attn.qkv_net.weight"] = torch.cat(heads, 1).flatten(0, 1)
            continue
        renamed[f"{layer}.dec_attn.q_net.weight"] = q
        renamed[f"{layer}.dec_attn.kv_net.weight"] = torch.cat([k, second, v])
    for name in [name for name in renamed if name.endswith(".attn.similarity.shift")]:
        # Subtracted from the key there, added to it here.
        layer = name.removesuffix(".attn.similarity.shift")
        renamed[f"{layer}.dec_attn.mu"] = -renamed.pop(name)
    for name in [name for name in renamed if name.endswith(".attn.similarity.prior")]:
        layer = name.removesuffix(".attn.similarity.prior")
        for number, prior in enumerate(renamed.pop(name)):
            renamed[f"{layer}.dec_attn.pi{number}"] = prior if is_mlk else prior[:, None, None]
    return renamed
