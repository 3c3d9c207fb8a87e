"""Translation by fairseq, and the experiments in experiments/translation_mgk.

The models (transformer_iwslt_de_en and transformer_vaswani_wmt_en_de_big), the dictionary, the
batches, the label-smoothed loss, the optimizer and its schedule, and the beam search are the
released ones, in float64 on a CPU, with dropout and padding, for smaller models; the loop around
them is the recorder's. Positions stay in float32. Sources are padded on their right, except in the
run `left` (without dropout, whose masks would lie on other tokens). Token ids are those of this
project plus one. After training, `translations` are the ids that beam search finds for sources of
several lengths, one at a time, and `scores` their mean logarithmic probabilities. Recording needs
omegaconf, hydra-core and bitarray.
"""

import dataclasses
import os
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.paths import EXPERIMENTS
from torch import Tensor, nn

from lit_attn.data.text.ids import END, IGNORED, PADDING
from lit_attn.schema.plugins import load_parts
from lit_attn.tasks.beam_search import translate
from released.record import Clone
from released.recording import Arrays, Recorder, Tensors, generator, rename, shared_draws
from released.replaying import Replay, shipped_cell

REPOSITORY, COMMIT = "facebookresearch/fairseq", "3d262bb"
EXPERIMENT = "experiments/translation_mgk/iwslt14.yaml, experiments/translation_mgk/wmt14.yaml"
TOLERANCES = {
    "loss": 1e-12,
    "gradient": 1e-11,
    "change": 1e-9,
    "sample": 1e-10,
    "translations": 0.0,
    "scores": 1e-12,
}
RUNS = ["iwslt-0", "iwslt-1", "left-0", "wmt-0"]
STEPS, WARMUP, ROWS, VOCABULARY = 24, 6, 4, 30
WIDTH, DEPTH, HEADS, FFN, CONTEXT = 16, 2, 2, 24, 64
LENGTHS = (9, 7, 6, 3)
"""Tokens of the sources of a batch, without their end."""

SOURCES = ((5, 8, 3, 12, 20, 7, 9), (11, 4), (25, 6, 6, 14))
"""Ids of the sources that are translated, without their end."""

LIMITS = ((1.2, 10), (0.0, 3))
"""Largest number of tokens of a translation for each token of its source, and beyond it."""


def pairs(seed: int, step: int) -> list[tuple[list[int], ...]]:
    """Return ids of the sources and targets of a step, without their ends."""
    drawn = generator("pairs", seed, step)
    # The longest target has five tokens or more, so no batch is as long as it is wide.
    lengths = [int(drawn.integers(5, 9)), *drawn.integers(1, 9, size=ROWS - 1).tolist()]
    sizes = zip(LENGTHS, lengths, strict=True)
    return [
        tuple(drawn.integers(3, VOCABULARY - 1, size=n).tolist() for n in pair) for pair in sizes
    ]


def import_released(clone: Clone) -> None:
    """Import the parts of fairseq that translation needs, in float64."""
    package: Any = ModuleType("fairseq")
    package.__path__ = [str(clone.folder / "fairseq")]
    sys.modules["fairseq"] = package
    dataclass = dataclasses.dataclass

    def hashable(cls: Any = None, **options: Any) -> Any:
        # Python 3.11 refuses default values that have no hash.
        options = {"unsafe_hash": True} | options
        return dataclass(**options) if cls is None else dataclass(cls, **options)

    for name in ("hydra.core.config_store", "torch._dynamo"):
        import_module(name)
    float32, float64 = "softmax(x, dim=dim, dtype=torch.float32)", "torch.float64)"
    wide = {
        f"return F.{kind}{float32}": f"return F.{kind}{float32}".replace("torch.float32)", float64)
        for kind in ("", "log_")
    }
    package.utils = clone.load("fairseq.utils", "fairseq/utils.py", wide)
    # Packages import all files of their folders; this recorder names those that it needs.
    with (
        patch.object(dataclasses, "dataclass", hashable),
        patch.object(os, "listdir", lambda _: []),
    ):
        for name in (
            "models.transformer",
            "criterions.label_smoothed_cross_entropy",
            "optim",
            "optim.lr_scheduler.inverse_square_root_schedule",
            "data.language_pair_dataset",
            "sequence_generator",
        ):
            import_module(f"fairseq.{name}")
        clone.load("fairseq.optim.adam", "fairseq/optim/adam.py", {})


def record(clone: Clone, run: str) -> Arrays:
    """Train one case and return the record."""
    case, _, number = run.rpartition("-")
    seed, is_wmt = int(number), case == "wmt"
    torch.set_default_dtype(torch.float64)
    import_released(clone)
    modules = sys.modules
    transformer: Any = modules["fairseq.models.transformer"]
    dictionary: Any = modules["fairseq.data.dictionary"].Dictionary()
    for word in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(str(word))
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    # The options of the examples in the README files, in the recorded size.
    sizes: dict[str, Any] = {"dropout": 0.0 if case == "left" else 0.3}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_embed_dim": WIDTH, f"{part}_ffn_embed_dim": FFN}
        sizes |= {f"{part}_layers": DEPTH, f"{part}_attention_heads": HEADS}
    shared = "share_all_embeddings" if is_wmt else "share_decoder_input_output_embed"
    options = Namespace(**sizes, **{shared: True})
    name = "transformer_vaswani_wmt_en_de_big" if is_wmt else "transformer_iwslt_de_en"
    modules["fairseq.models"].ARCH_CONFIG_REGISTRY[name](options)
    network = transformer.TransformerModel.build_model(options, task)
    smoothed: Any = modules["fairseq.criterions.label_smoothed_cross_entropy"]
    criterion = smoothed.LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    adam: dict[str, Any] = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "lr": [5e-4]}
    adam |= {"fp16_adam_stats": False, "weight_decay": 0.0 if is_wmt else 0.0001}
    optimizer: Any = modules["fairseq.optim.adam"].FairseqAdam(
        Namespace(**adam), list(network.parameters())
    )
    start = 1e-7 if is_wmt else -1
    schedule: Any = modules["fairseq.optim.lr_scheduler.inverse_square_root_schedule"]
    schedule = schedule.InverseSquareRootSchedule(
        Namespace(lr=[5e-4], warmup_updates=WARMUP, warmup_init_lr=start), optimizer
    )
    collate: Any = modules["fairseq.data.language_pair_dataset"].collate
    recorder = Recorder()
    recorder.start_from(seed)(network)
    network.train()
    with recorder, shared_draws(seed), batch_first():
        for step in range(STEPS):
            schedule.step_update(step)
            samples = [
                {"id": row, "source": ids(pair[0], 2), "target": ids(pair[1], 2)}
                for row, pair in enumerate(pairs(seed, step))
            ]
            is_left = case == "left"
            batch = collate(samples, dictionary.pad(), dictionary.eos(), left_pad_source=is_left)
            optimizer.zero_grad()
            loss, size, _ = criterion(network, batch)
            optimizer.backward(loss)
            recorder.losses[-1] /= size
            optimizer.multiply_grads(1 / size)
            optimizer.step()
    return recorder.arrays() | search(network, dictionary, is_wmt)


def ids(tokens: list[int], end: int) -> Tensor:
    """Return the released ids of a sentence: this project's plus one, and its end."""
    return torch.tensor([*(token + 1 for token in tokens), end])


def batch_first() -> Any:
    """Draw the masks of (n, B, d), within the released layers, as those of (B, n, d)."""
    drawn = torch.nn.functional.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if x.shape[0] == ROWS:
            return drawn(x, p, training)
        return drawn(x.transpose(0, 1), p, training).transpose(0, 1)

    return patch.object(torch.nn.functional, "dropout", dropout)


def search(network: nn.Module, dictionary: Any, is_wmt: bool) -> Arrays:
    """Return the best translation of each of SOURCES, and its score, by the released search."""
    generate: Any = sys.modules["fairseq.sequence_generator"].SequenceGenerator
    options = {"beam_size": 4, "len_penalty": 0.6} if is_wmt else {"beam_size": 5}
    translations, scores = [], []
    for ratio, extra in LIMITS:
        searcher = generate([network], dictionary, max_len_a=ratio, max_len_b=extra, **options)
        with patch.object(Tensor, "float", Tensor.double):
            for source in SOURCES:
                tokens = ids(list(source), 2)[None]
                inputs = {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.shape[1]])}
                best = searcher.generate([network], {"net_input": inputs})[0][0]
                translation = best["tokens"].tolist()[:-1]
                translations.append([(token - 1) % VOCABULARY for token in translation])
                scores.append(float(best["score"]))
    return {"translations": padded(translations), "scores": np.array(scores)}


def padded(translations: list[list[int]]) -> Any:
    """Return ids (sources, CONTEXT); zeros follow a translation."""
    return np.array([[*row, *[0] * (CONTEXT - len(row))] for row in translations])


def replay(run: str, folder: Path) -> Replay:
    """Return this project's side: the shipped experiment, shrunk."""
    case, _, number = run.rpartition("-")
    seed, is_wmt = int(number), case == "wmt"
    for split, count in (("train", STEPS // 4), ("valid", 2), ("test", 2)):
        for language in ("de", "en"):
            (folder / f"{split}.{language}").write_text("a b\n" * count)
    changes: dict[str, Any] = {
        "data.folder": str(folder),
        "data.vocabulary": VOCABULARY,
        "data.context": CONTEXT,
        "data.batch_size": 4,
        "data.accumulate": 1,
        "task.translate_every": None,
        "model.dim": WIDTH,
        "model.depth": DEPTH,
        "model.heads": HEADS,
        "model.head_dim": WIDTH // HEADS,
        "model.ffn.width": FFN,
        "model.init.embedding": WIDTH**-0.5,
        "schedule.warmup_steps": WARMUP,
        "training.epochs": 4,
        "training.precision": "fp32",
    }
    if case == "left":
        changes["model.dropout"] = 0.0
    recipe = EXPERIMENTS / "translation_mgk"
    load_parts([recipe / "fairseq_adam.py", recipe / "compound_splitting.py"])
    cell = shipped_cell(
        "translation_mgk/wmt14.yaml" if is_wmt else "translation_mgk/iwslt14.yaml", changes, seed
    )

    def batch(step: int) -> tuple[Tensor, ...]:
        sentences = pairs(seed, step)
        longest = 1 + max(len(target) for _, target in sentences)
        source = torch.full((ROWS, 1 + max(LENGTHS)), PADDING)
        inputs = torch.full((ROWS, longest), PADDING)
        targets = torch.full((ROWS, longest), IGNORED)
        for row, (words, translation) in enumerate(sentences):
            source[row, : len(words) + 1] = torch.tensor([*words, END])
            inputs[row, : len(translation) + 1] = torch.tensor([END, *translation])
            targets[row, : len(translation) + 1] = torch.tensor([*translation, END])
        mean = (targets != IGNORED).sum() / ROWS
        return source, inputs, targets, mean.double().repeat(ROWS)

    def outputs(network: Any) -> Arrays:
        source = torch.full((len(SOURCES), 1 + max(map(len, SOURCES))), PADDING)
        for row, words in enumerate(SOURCES):
            source[row, : len(words) + 1] = torch.tensor([*words, END])
        network.eval()
        task: Any = cell.experiment.task
        found: list[list[int]] = []
        scores = []
        for ratio, extra in LIMITS:
            limited = task.model_copy(update={"ratio": ratio, "extra": extra})
            found += translate(network, source, limited)
        for row, translation in enumerate(found):
            inputs = torch.tensor([[END, *translation]])
            log_p = network(source[row % len(SOURCES)][None], inputs).log_softmax(-1)[0]
            targets = torch.tensor([*translation, END])
            total = log_p.gather(1, targets[:, None]).sum().item()
            scores.append(total / len(targets) ** task.length_penalty)
        return {"translations": padded(found), "scores": np.array(scores)}

    return Replay(cell, batch, released_names, draws=case != "left", outputs=outputs)


def released_names(ours: Tensors) -> Tensors:
    """Rename this project's parameters; the first id there stands for the last one here."""
    names = [
        (".tokens.", ".embed_tokens."),
        (".blocks.", ".layers."),
        (".attn.", ".self_attn."),
        (".cross.", ".encoder_attn."),
        (".proj.", ".out_proj."),
        (".norm1.", ".self_attn_layer_norm."),
        (".norm2.", ".final_layer_norm."),
        (".norm3.", ".encoder_attn_layer_norm."),
        (".ffn.up.", ".fc1."),
        (".ffn.down.", ".fc2."),
    ]
    renamed = rename(ours, names)
    for name in [name for name in renamed if ".qkv." in name]:
        parts = renamed.pop(name).chunk(3)
        for letter, part in zip("qkv", parts, strict=True):
            renamed[name.replace(".qkv.", f".{letter}_proj.")] = part
    for name in [name for name in renamed if ".embed_tokens." in name]:
        renamed[name] = renamed[name].roll(1, 0)
    return renamed
