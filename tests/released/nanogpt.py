"""nanoGPT's training loop, and experiments/gpt2/openwebtext.yaml.

The loop is train.py itself, in float64 on a CPU, with a smaller model and a shorter schedule.
The run `bf16` has float32 weights and bfloat16 products (autocast) on both sides, which the
released code uses on a GPU only. Its tolerances are larger, because CPUs sum such products in
different orders. In the run `ddp` train.py runs under torchrun with two ranks,
DistributedDataParallel and the backend gloo, and the experiment has `devices: 2`; each rank has the
micro-batches of the released rank. In the run `compile` both sides use torch.compile.
"""

from pathlib import Path

import numpy as np
import torch
from torch._dynamo.utils import counters

from released import ranks
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, generator, rename
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT, RUNS = "karpathy/nanoGPT", "3adf61e", ["0", "1", "bf16-0", "ddp-0", "compile-0"]
EXPERIMENT = "experiments/gpt2/openwebtext.yaml"
TOLERANCES = {"loss": 1e-12, "gradient": 1e-10, "change": 1e-9, "sample": 1e-9}
"""Largest allowed relative difference of each quantity."""
HALF_PRECISION = ("bf16-0",)
RUN_TOLERANCES = {"bf16-0": {"loss": 1e-3, "gradient": 1e-2, "change": 1e-2, "sample": 1e-3}}

STEPS, BATCH, CONTEXT, VOCABULARY = 30, 2, 12, 256
SETTINGS = f"""
out_dir = 'out'
backend = 'gloo'
eval_interval = 10**9
eval_iters = 1
batch_size = {BATCH}
block_size = {CONTEXT}
n_layer, n_head, n_embd = 2, 3, 24
warmup_iters, lr_decay_iters, max_iters = 7, {STEPS + 10}, {STEPS}
device, dtype, compile = 'cpu', 'float32', False
"""


def world(run: str) -> int:
    """Return the number of ranks of a run."""
    return ranks.WORLD if run.startswith("ddp") else 1


def accumulate(run: str) -> int:
    """Return the number of micro-batches of a step on each rank."""
    return 2 if run.startswith("ddp") else 3


def batch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (BATCH, CONTEXT) of micro-batch `number`."""
    ids = generator("batch", seed, number).integers(VOCABULARY, size=(BATCH, CONTEXT + 1))
    tokens = torch.from_numpy(ids.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def record(clone: Clone, run: str) -> Arrays:
    """Train from the initial values of seed `run` and return the record."""
    return record_rank(clone, run, 0) if world(run) == 1 else ranks.record(__name__, clone, run)


def record_rank(clone: Clone, run: str, rank: int) -> Arrays:
    """Train as one rank and return its record."""
    case, _, number = run.rpartition("-")
    seed, is_half = int(number), case == "bf16"
    torch.set_default_dtype(torch.float32 if is_half else torch.float64)
    autocast = "torch.amp.autocast(device_type=device_type, dtype=ptdtype)"
    half = {f"nullcontext() if device_type == 'cpu' else {autocast}": autocast} if is_half else {}
    settings = SETTINGS + f"gradient_accumulation_steps = {accumulate(run) * world(run)}\n"
    settings += "dtype = 'bfloat16'\n" if is_half else ""
    settings += "compile = True\n" if case == "compile" else ""
    devices = {
        "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": (
            "    device = 'cpu'\n"
        ),
        "model = DDP(model, device_ids=[ddp_local_rank])": "model = DDP(model)",
    }
    recorder = Recorder(accumulate(run))
    count = 0

    def next_batch(_: str) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal count
        count += 1
        return batch(seed, (count - 1) * world(run) + rank)

    with recorder:
        clone.run(
            "train.py",
            {
                "exec(open('configurator.py').read())": "exec(SETTINGS)",
                "model_args['vocab_size'] = meta_vocab_size if meta_vocab_size is not None "
                "else 50304": f"model_args['vocab_size'] = {VOCABULARY}",
                "model.to(device)\n": "model = PREPARE(model.to(device))\n",
                "def get_batch(split):\n": "def unused(split):\n",
                "losses = estimate_loss()": "losses = {'train': 0.0, 'val': 0.0}",
                **half,
                **devices,
            },
            {"SETTINGS": settings, "PREPARE": recorder.start_from(seed), "get_batch": next_batch},
        )
    return recorder.arrays()


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    seed, is_half = int(number), case == "bf16"
    tokens = np.arange(1, 65, dtype=np.uint16)
    for split in ("train", "val"):
        tokens.tofile(folder / f"{split}.bin")
    cell = shipped_cell(
        "gpt2/openwebtext.yaml",
        {
            "data.folder": str(folder),
            "data.tokenizer": "bytes",
            "data.context": CONTEXT,
            "data.batch_size": BATCH * accumulate(run) * world(run),
            "data.accumulate": accumulate(run),
            "data.epoch_steps": STEPS + 10,
            "data.eval_tokens": None,
            "model.dim": 24,
            "model.depth": 2,
            "model.heads": 3,
            "model.ffn.width": 96,
            "schedule.warmup": 7 / (STEPS + 10),
            "schedule.start": 6e-4 / 8,
            "training.epochs": 1,
            "training.max_steps": STEPS + 1,
            "training.precision": "bf16" if is_half else "fp32",
            "training.compile": "blocks" if case == "compile" else "none",
            "training.devices": world(run),
        },
        seed,
    )

    def step(number: int) -> tuple[torch.Tensor, ...]:
        count = accumulate(run) * world(run)
        parts = [batch(seed, number * count + part) for part in range(count)]
        # Rank r has the samples r, r + 2, ... of a step, and the micro-batches r, r + 2, ...
        shares = [parts[rank :: world(run)] for rank in range(world(run))]
        both = [[torch.cat(tensors) for tensors in zip(*share, strict=True)] for share in shares]
        return tuple(torch.stack(tensors, 1).flatten(0, 1) for tensors in zip(*both, strict=True))

    precision = torch.float32 if is_half else torch.float64
    replay = Replay(cell, step, released_names, accumulate(run), precision=precision)
    if case != "compile":
        return replay
    torch.compiler.reset()
    counters["stats"].clear()
    return replay._replace(outputs=require_graphs)


def require_graphs(_: torch.nn.Module) -> Arrays:
    """Return no arrays; fail if torch.compile has compiled nothing since the replay began."""
    assert counters["stats"]["unique_graphs"]
    return {}


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters."""
    return rename(
        ours,
        [
            ("trunk.tokens.", "transformer.wte."),
            ("trunk.positions.", "transformer.wpe."),
            ("trunk.norm.", "transformer.ln_f."),
            ("trunk.blocks.", "transformer.h."),
            (".norm1.", ".ln_1."),
            (".norm2.", ".ln_2."),
            (".attn.qkv.", ".attn.c_attn."),
            (".attn.proj.", ".attn.c_proj."),
            (".ffn.up.", ".mlp.c_fc."),
            (".ffn.down.", ".mlp.c_proj."),
        ],
    )
