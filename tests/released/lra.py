"""The Long Range Arena code of transformer-mgk, and the lra_* experiments.

The script is run_tasks.py itself, in float64 on a CPU, with dropout, short padded sequences and a
short schedule. Recording needs gpytorch (the released distance function).
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, cut, generator, rename, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "minhtannguyen/transformer-mgk", "73608b3"
EXPERIMENT = (
    "experiments/long_range_arena/listops.yaml, experiments/long_range_arena/retrieval.yaml"
)
TOLERANCES = {"loss": 1e-10, "gradient": 1e-8, "change": 1e-7, "sample": 1e-7}
STEPS, WARMUP, BATCH, CONTEXT, HEADS = 24, 8, 4, 20, 2

# The released options and this project's `attention`, by case. Heads are 32 wide.
CLAMPED: dict[str, Any] = {"prior": "clamped", "prior_scope": "layer"}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "softmax": ([], {"preset": "standard"}),
    "mgk": (["--key2", "1"], {"preset": "mgk", "similarity": CLAMPED}),
    "smgk": (
        ["--multi_gauss", "1"],
        {"preset": "smgk", "similarity": CLAMPED | {"shift_init": "released"}},
    ),
    "mgk-hard": (["--key2", "1", "--hard_em", "1"], {"preset": "mgk-hard"}),
    "mgk-soft-e": (
        ["--key2", "1", "--soft_em", "1"],
        {"preset": "mgk-soft-e", "similarity": {"prior_scope": "position", "positions": CONTEXT}},
    ),
    "linear": (["linear"], {"preset": "linear", "similarity": {"divide_by": "root-length"}}),
    "mlk": (
        ["linear", "--key2", "1"],
        {
            "preset": "mlk",
            "similarity": CLAMPED | {"mixing": "before", "divide_by": "root-length"},
        },
    ),
    "retrieval": (["retrieval"], {"preset": "standard"}),
}
RUNS = ["softmax-0", "softmax-1", *(f"{case}-0" for case in CASES if case != "softmax")]


def sequences(seed: int, number: int, documents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (BATCH, documents, CONTEXT) of a step, 0 where padded, and labels (BATCH,)."""
    drawn = generator("sequences", seed, number)
    ids = drawn.integers(1, 16, size=(BATCH, documents, CONTEXT))
    lengths = drawn.integers(5, CONTEXT + 1, size=(BATCH, documents, 1))
    ids[torch.arange(CONTEXT).numpy() >= lengths] = 0
    return torch.from_numpy(ids), torch.from_numpy(drawn.integers(2, size=BATCH))


class Examples:
    """Data set of the released script: the samples of all steps, one after another."""

    def __init__(self, seed: int, documents: int) -> None:
        self.seed, self.documents = seed, documents

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, labels = sequences(self.seed, index // BATCH, self.documents)
        item = {"label": labels[index % BATCH]}
        for number in range(self.documents):
            item[f"input_ids_{number}"] = tokens = ids[index % BATCH, number]
            item[f"mask_{number}"] = (tokens != 0).double()
        return item


def record(clone: Clone, run: str) -> Arrays:
    """Train one case and return the record."""
    case, _, number = run.rpartition("-")
    seed, options = int(number), list(CASES[case][0])
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(clone.folder / "lra"))
    # Imported by the released code, and not used by these cases.
    sys.modules["attention_transformer_ls"] = ModuleType("attention_transformer_ls")
    sys.modules["attention_transformer_ls"].AttentionLS = None  # type: ignore
    sys.modules["attention_performer"] = ModuleType("attention_performer")
    sys.modules["attention_performer"].PerformerAttention = None  # type: ignore
    model = "linear" if "linear" in options else "softmax"
    task = "retrieval" if "retrieval" in options else "listops"
    options = [option for option in options if option not in ("linear", "retrieval")]
    options += ["--model", model, "--task", task, "--num_head", str(HEADS), "--vocab_size", "257"]
    options += ["--max_seq_len", str(CONTEXT), "--batch_size", str(BATCH), "--seed", str(seed)]
    options += ["--num_train_steps", str(STEPS), "--warmup", str(WARMUP)]
    options += ["--eval_frequency", str(STEPS), "--num_eval_steps", "1"]
    recorder = Recorder()

    def same(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.object(sys, "argv", ["", *options, "--chk_path", folder]))
        for kind in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(kind, "cuda", same))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        stack.enter_context(recorder)
        stack.enter_context(shared_draws(seed))
        clone.run(
            "lra/run_tasks.py",
            {
                "from fvcore.nn import FlopCountAnalysis\n": "",
                "import wandb\n": "",
                "from dataset import LRADataset\n": "",
                "model = model.cuda()\n": "model = PREPARE(model)\n",
                "max(args.batch_size // len(device_ids) // 32, 1)": "1",
            },
            {
                "LRADataset": lambda *_: Examples(seed, 2 if task == "retrieval" else 1),
                "PREPARE": recorder.start_from(seed),
            },
        )
    return recorder.arrays()


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk to the recorded size."""
    case, _, number = run.rpartition("-")
    seed, documents = int(number), 2 if case == "retrieval" else 1
    text = "\t".join(["ab"] * documents)
    for split in ("train", "val", "test"):
        (folder / f"{split}.tsv").write_text(f"0\t{text}\n1\t{text}\n" * BATCH)
    cell = shipped_cell(
        "long_range_arena/retrieval.yaml"
        if case == "retrieval"
        else "long_range_arena/listops.yaml",
        {
            "data": {
                "kind": "labelled-text",
                "name": "random",
                "folder": str(folder),
                "context": CONTEXT,
                "vocabulary": 257,
                "classes": 2,
                "pairs": case == "retrieval",
                "batch_size": BATCH,
                "epoch_steps": STEPS,
            },
            "model.heads": HEADS,
            "model.attention": CASES[case][1],
            "schedule.warmup": WARMUP / STEPS,
            "training.epochs": 1,
            "training.precision": "fp32",
        },
        seed,
    )

    def step(number: int) -> tuple[torch.Tensor, ...]:
        ids, labels = sequences(seed, number, documents)
        ids = ids if documents == 2 else ids[:, 0]
        return ids, ids != 0, labels

    return Replay(cell, step, released_names, draws=True)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters, and cut q, k and v apart."""
    renamed = rename(
        ours,
        [
            ("trunk.tokens.", "model.embeddings.word_embeddings."),
            ("trunk.positions.", "model.embeddings.position_embeddings."),
            ("trunk.norm.", "model.norm."),
            ("trunk.blocks.", "model.transformer_"),
            (".attn.proj.", ".mha.ff."),
            (".attn.similarity.more.", ".mha.W_k2."),
            (".attn.similarity.prior", ".mha.attn.pi"),
            (".attn.similarity.shift", ".mha.attn.multi_gauss_kernel.mu"),
            (".ffn.up.", ".mlpblock.0."),
            (".ffn.down.", ".mlpblock.3."),
            ("classifier.", "seq_classifer.mlpblock."),
        ],
    )
    cut(renamed, ".attn.qkv.", [".mha.W_q.", ".mha.W_k.", ".mha.W_v."])
    for name in renamed:
        if name.endswith(".mha.attn.pi"):
            renamed[name] = renamed[name].flatten()
        if name.endswith(".mu"):
            # Subtracted from the key there, added to it here.
            renamed[name] = -renamed[name]
    return renamed
