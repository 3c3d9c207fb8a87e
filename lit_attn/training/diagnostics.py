"""Looks at the attention layers while a cell trains, and changes nothing (docs/diagnostics.md).

Shapes: n tokens, H heads.
"""

import copy
import io
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from lit_attn.attention import diagnostics
from lit_attn.attention.layer import Attention
from lit_attn.cells.records import DiagnosticRow, csv_lines, read_diagnostics
from lit_attn.config.diagnostics import OF_SAMPLES
from lit_attn.config.diagnostics import Diagnostics as Chosen
from lit_attn.files import append, write_atomic
from lit_attn.tasks.base import Task
from lit_attn.training.layer_inputs import Call, calls_of, in_parts

# Tokens of the maps that are kept: what a figure can show.
MAP_TOKENS = 256


Arrays = dict[str, np.ndarray[Any, Any]]


class Looked(NamedTuple):
    """Every row of one look, and its arrays: `rank.1` (samples, H), `map.1` (H, n, n)."""

    rows: list[DiagnosticRow]
    arrays: Arrays


class Diagnostics(L.Callback):
    """Appends to `diagnostics.csv` after evaluations; the last one writes `attention.npz` too.

    What is looked at are the weights that train, on the first samples of the first evaluated split,
    without dropout, uncompiled; each layer in float64. No random number is drawn. `times` are the
    seconds of every look.
    """

    def __init__(
        self,
        folder: Path,
        chosen: Chosen,
        interval: int,
        total: int,
        tensorboard: TensorBoardLogger,
    ) -> None:
        """`interval` is the steps from one evaluation to the next, `total` those of the cell."""
        self.path = folder / "diagnostics.csv"
        self.arrays = folder / "attention.npz"
        self.chosen = chosen
        self.interval = interval
        self.total = total
        self.tensorboard = tensorboard
        self.inputs: tuple[Any, ...] | None = None
        self.times: list[float] = []

    def start(self, step: int) -> None:
        """Begin, or go on from a checkpoint at `step`: rows past it will be written again."""
        kept = [row for row in read_diagnostics(self.path) if row.step <= step] if step else []
        write_atomic(self.path, csv_lines([DiagnosticRow._fields, *kept]))
        self.arrays.unlink(missing_ok=True)

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero and batch_idx == dataloader_idx == 0 and self._due(trainer):
            assert isinstance(module, Task)
            self.inputs = tuple(part[: self.chosen.samples] for part in module.inputs(batch))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.inputs is None:
            return
        assert isinstance(module, Task)
        began, step = time.perf_counter(), trainer.global_step
        looked = look(module.network, self.inputs, self.chosen, step)
        self.inputs = None
        append(self.path, csv_lines(looked.rows))
        scalars: dict[str, list[float]] = {}
        for row in looked.rows:
            scalars.setdefault(f"diagnostics/{row.name}/layer-{row.layer}", []).append(row.value)
        means = {name: math.fsum(values) / len(values) for name, values in scalars.items()}
        self.tensorboard.log_metrics(means, step)
        if step >= self.total and looked.arrays:
            content = io.BytesIO()
            np.savez_compressed(content, **looked.arrays)  # type: ignore[arg-type]  # no bool
            write_atomic(self.arrays, content.getvalue())
        self.times.append(time.perf_counter() - began)

    def _due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        return step >= self.total or step // self.interval % self.chosen.every == 0


@torch.no_grad()
def look(network: nn.Module, inputs: tuple[Any, ...], chosen: Chosen, step: int) -> Looked:
    """Everything that `chosen` asks for of every attention layer of `network`."""
    layers = [module for module in network.modules() if isinstance(module, Attention)]
    calls: list[list[Call]] = [[] for _ in layers]
    if OF_SAMPLES & set(chosen.kinds):
        calls = calls_of(network, layers, inputs)
    rows: list[DiagnosticRow] = []
    arrays: Arrays = {}
    for number, (layer, own) in enumerate(zip(layers, calls, strict=True), start=1):
        # The one at hand alone: a copy of all would double what the network holds.
        found = _of_layer(copy.deepcopy(layer).double(), own, chosen.kinds)
        rows += [DiagnosticRow(step, number, *row) for row in found.rows]
        arrays |= {f"{name}.{number}": array for name, array in found.arrays.items()}
    return Looked(rows, arrays)


class _Found(NamedTuple):
    rows: list[tuple[int | None, str, float]]
    arrays: Arrays


def _of_layer(layer: Attention, calls: list[Call], kinds: tuple[str, ...]) -> _Found:
    """Head, name and value of everything that is asked for of one layer, which is in float64."""
    rows: list[tuple[int | None, str, float]] = []
    arrays: Arrays = {}
    tokens: dict[str, list[Tensor]] = {}
    ranks = []
    for call, present in in_parts(layer, calls):
        seen = layer.look(**call.arguments)
        if "residual" in kinds:
            for name, values in diagnostics.residual(layer, seen, call.stream).items():
                tokens.setdefault(name, []).append(values.masked_fill(~present, torch.nan))
        if seen.weights is None:
            continue
        if "rank" in kinds:
            ranks.append(diagnostics.ranks(seen.weights, present))
        if "maps" in kinds and "map" not in arrays:
            shown = seen.weights[0, :, :MAP_TOKENS, :MAP_TOKENS]
            arrays["map"] = shown.to(torch.float32).cpu().numpy()
    for name, parts in tokens.items():
        values = torch.cat(parts)
        rows += [(None, name, values.nanmean().item())]
        rows += [(None, f"{name}@1", values[:, 0].nanmean().item())]
    if ranks:
        every = torch.cat(ranks)
        arrays["rank"] = every.to(torch.int32).cpu().numpy()
        rows += [(m, "rank", of) for m, of in enumerate(every.double().mean(0).tolist(), start=1)]
    if "heads" in kinds:
        captured = diagnostics.captured_variance(layer)
        rows += [(None, f"captured-{name}", value) for name, value in captured.items()]
    if "mixture" in kinds and (pi := diagnostics.mixture(layer)) is not None:
        for m, of_keys in enumerate(pi.tolist(), start=1):
            head = m if len(pi) == layer.num_heads else None
            rows += [(head, f"pi-{r}", value) for r, value in enumerate(of_keys, start=1)]
    return _Found([row for row in rows if math.isfinite(row[2])], arrays)
