"""Diagnostics of the attention layers, recorded during training without changing it.

docs/diagnostics.md explains the quantities. Shapes: n tokens, H heads.
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
from lit_attn.config.diagnostics import OF_SAMPLES, Diagnostics
from lit_attn.files import append, write_atomic
from lit_attn.tasks.base import TaskModule
from lit_attn.training.layer_inputs import LayerCall, record_calls, split_calls

MAP_TOKENS = 256
"""Tokens of the attention maps that are kept: as many as a figure can show."""

Arrays = dict[str, np.ndarray[Any, Any]]


class NetworkDiagnostics(NamedTuple):
    """Diagnostics of all layers at one step.

    Arrays are named by layer: `rank.1` (samples, H), `map.1` (H, n, n).
    """

    rows: list[DiagnosticRow]
    arrays: Arrays


class DiagnosticsCallback(L.Callback):
    """Callback that appends diagnostics to `diagnostics.csv` after evaluations.

    The last evaluation writes `attention.npz` too. The diagnostics describe the trained weights
    (not their average) on the first samples of the first evaluated split, without dropout and
    compilation, each layer in float64. No random number is drawn. `times` has the seconds of every
    recording.
    """

    def __init__(
        self,
        folder: Path,
        settings: Diagnostics,
        interval: int,
        total: int,
        tensorboard: TensorBoardLogger,
    ) -> None:
        """`interval` is the number of steps between two evaluations, `total` that of the cell."""
        self.path = folder / "diagnostics.csv"
        self.arrays = folder / "attention.npz"
        self.settings = settings
        self.interval = interval
        self.total = total
        self.tensorboard = tensorboard
        self.inputs: tuple[Any, ...] | None = None
        self.times: list[float] = []

    def start(self, step: int) -> None:
        """Start the file, or keep its rows up to the checkpoint at `step` that training resumes."""
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
        if trainer.is_global_zero and batch_idx == dataloader_idx == 0 and self._is_due(trainer):
            assert isinstance(module, TaskModule)
            self.inputs = tuple(part[: self.settings.samples] for part in module.inputs(batch))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.inputs is None:
            return
        assert isinstance(module, TaskModule)
        started, step = time.perf_counter(), trainer.global_step
        rows, arrays = diagnose(module.network, self.inputs, self.settings, step)
        self.inputs = None
        append(self.path, csv_lines(rows))
        scalars: dict[str, list[float]] = {}
        for row in rows:
            scalars.setdefault(f"diagnostics/{row.name}/layer-{row.layer}", []).append(row.value)
        means = {name: math.fsum(values) / len(values) for name, values in scalars.items()}
        self.tensorboard.log_metrics(means, step)
        if step >= self.total and arrays:
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no bool
            write_atomic(self.arrays, content.getvalue())
        self.times.append(time.perf_counter() - started)

    def _is_due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        return step >= self.total or step // self.interval % self.settings.every == 0


@torch.no_grad()
def diagnose(
    network: nn.Module, inputs: tuple[Any, ...], settings: Diagnostics, step: int
) -> NetworkDiagnostics:
    """Return the diagnostics that `settings` selects, for every attention layer of `network`."""
    layers = [module for module in network.modules() if isinstance(module, Attention)]
    calls: list[list[LayerCall]] = [[] for _ in layers]
    if OF_SAMPLES & set(settings.kinds):
        calls = record_calls(network, layers, inputs)
    rows: list[DiagnosticRow] = []
    arrays: Arrays = {}
    for number, (layer, layer_calls) in enumerate(zip(layers, calls, strict=True), start=1):
        # One layer at a time: a float64 copy of all layers would triple the network's memory.
        float64_layer = copy.deepcopy(layer).double()
        values, layer_arrays = _diagnose_layer(float64_layer, layer_calls, settings.kinds)
        rows += [DiagnosticRow(step, number, *value) for value in values]
        arrays |= {f"{name}.{number}": array for name, array in layer_arrays.items()}
    return NetworkDiagnostics(rows, arrays)


def _diagnose_layer(
    layer: Attention, calls: list[LayerCall], kinds: tuple[str, ...]
) -> tuple[list[tuple[int | None, str, float]], Arrays]:
    """Return (head, name, value) of each finite diagnostic of a float64 layer, and the arrays."""
    values: list[tuple[int | None, str, float]] = []
    arrays: Arrays = {}
    token_values: dict[str, list[Tensor]] = {}
    ranks = []
    for call, is_attended in split_calls(layer, calls):
        record = layer.record(**call.arguments)
        if "residual" in kinds:
            for name, value in diagnostics.residual(layer, record, call.stream).items():
                masked = value.masked_fill(~is_attended, torch.nan)
                token_values.setdefault(name, []).append(masked)
        if record.weights is None:
            continue
        if "rank" in kinds:
            ranks.append(diagnostics.ranks(record.weights, is_attended))
        if "maps" in kinds and "map" not in arrays:
            first_map = record.weights[0, :, :MAP_TOKENS, :MAP_TOKENS]
            arrays["map"] = first_map.to(torch.float32).cpu().numpy()
    for name, parts in token_values.items():
        all_tokens = torch.cat(parts)
        values += [(None, name, all_tokens.nanmean().item())]
        values += [(None, f"{name}@1", all_tokens[:, 0].nanmean().item())]
    if ranks:
        all_ranks = torch.cat(ranks)
        arrays["rank"] = all_ranks.to(torch.int32).cpu().numpy()
        means = all_ranks.double().mean(0).tolist()
        values += [(head, "rank", mean) for head, mean in enumerate(means, start=1)]
    if "heads" in kinds:
        captured = diagnostics.captured_variance(layer)
        values += [(None, f"captured-{name}", value) for name, value in captured.items()]
    if "mixture" in kinds and (pi := layer.similarity.mean_prior()) is not None:
        for number, head_pi in enumerate(pi.tolist(), start=1):
            head = number if len(pi) == layer.num_heads else None
            values += [(head, f"pi-{r}", value) for r, value in enumerate(head_pi, start=1)]
    return [value for value in values if math.isfinite(value[2])], arrays
