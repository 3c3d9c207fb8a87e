"""Diagnostics of the attention layers, recorded during training without changing it.

docs/diagnostics.md explains the quantities. Shapes: B batch, n tokens, d width, H heads.
"""

import copy
import inspect
import io
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_attn.attention import diagnostics
from lit_attn.attention.layer import Attention, TokenLayer
from lit_attn.attention.masks import split_mask
from lit_attn.cells.records import DiagnosticRow, csv_lines, read_diagnostics
from lit_attn.config.training import SAMPLED_KINDS, DiagnosticsConfig
from lit_attn.files import append, write_atomic
from lit_attn.training.recording import MetricsFile

MAP_SIZE = 256  # Rows and columns of the attention maps that are kept: as a figure can show.
KEY_TOKENS = 100  # Tokens of the first sample whose keys are kept (MGK Fig. 14).
MAX_WEIGHTS = 2**25
"""Attention weights computed at once, over samples, heads and keys (0.25 GiB in float64)."""

Arrays = dict[str, np.ndarray[Any, Any]]


class LayerCall(NamedTuple):
    """One call of a layer: arguments, and the residual stream (B, n, d) that gets its output."""

    arguments: dict[str, Any]
    stream: Tensor


class NetworkDiagnostics(NamedTuple):
    """Diagnostics of all layers at one step.

    Arrays are named by layer: `rank.1` (samples, H), `map.1` (H, n, n), `key-weights.1` (M H', d,
    D), `keys.1` (M H', n, D).
    """

    rows: list[DiagnosticRow]
    arrays: Arrays


@dataclass(eq=False)
class DiagnosticsCallback(L.Callback):
    """Callback that appends diagnostics to `diagnostics.csv` after evaluations.

    The last evaluation writes `attention.npz` too. The diagnostics describe the trained weights
    (not their average) on the first samples of the first split, in evaluation mode and in float64.
    With `first_epoch_every`, steps of the first epoch are recorded too, on samples of their batch.
    `interval` is the number of steps between two evaluations, `total` the steps of the cell.
    """

    folder: Path
    settings: DiagnosticsConfig
    interval: int
    total: int
    metrics: MetricsFile
    batches: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    times: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.path = self.folder / "diagnostics.csv"
        self.arrays = self.folder / "attention.npz"

    def start(self, step: int) -> None:
        """Start the file, or keep its rows up to the checkpoint at `step` that training resumes."""
        kept = [row for row in read_diagnostics(self.path) if row.step <= step] if step else []
        write_atomic(self.path, csv_lines([DiagnosticRow._fields, *kept]))
        self.arrays.unlink(missing_ok=True)

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        step = trainer.global_step
        is_due = step >= self.total or step // self.interval % self.settings.every == 0
        missing = self.settings.samples - sum(len(parts[0]) for parts in self.batches)
        if trainer.is_global_zero and dataloader_idx == 0 and is_due and missing > 0:
            self.batches.append(tuple(part[:missing] for part in module.inputs(batch)))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, step = self.settings.first_epoch_every, trainer.global_step
        is_step_end = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        # The evaluation after the last step of an epoch records that step.
        is_due = every is not None and step % every == 0 and step % self.interval
        if trainer.is_global_zero and trainer.current_epoch == 0 and is_step_end and is_due:
            self.batches = [tuple(p[: self.settings.samples] for p in module.inputs(batch))]
            self.on_validation_end(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not self.batches:
            return
        started, step = time.perf_counter(), trainer.global_step
        rows, arrays = diagnose(module.network, self.batches, self.settings, step)
        self.batches = []
        append(self.path, csv_lines(rows))
        scalars: dict[str, list[float]] = {}
        for row in rows:
            # TensorBoard sorts the names: these come after test, train and val.
            scalars.setdefault(f"within-layers/{row.name}/{row.layer}", []).append(row.value)
        for name, numbers in scalars.items():
            self.metrics.events.add_scalar(name, math.fsum(numbers) / len(numbers), step)
        if step >= self.total and arrays:
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no bool
            write_atomic(self.arrays, content.getvalue())
        self.times.append(time.perf_counter() - started)


@torch.no_grad()
def diagnose(
    network: nn.Module, batches: Sequence[tuple[Any, ...]], settings: DiagnosticsConfig, step: int
) -> NetworkDiagnostics:
    """Return the diagnostics that `settings` selects, for every attention layer of `network`."""
    token_layers = [module for module in network.modules() if isinstance(module, TokenLayer)]
    # Layers of users have no diagnostics, but they count.
    numbers = {layer: number for number, layer in enumerate(token_layers, start=1)}
    layers = [layer for layer in token_layers if isinstance(layer, Attention)]
    calls: list[list[LayerCall]] = [[] for _ in layers]
    if SAMPLED_KINDS & set(settings.kinds):
        for inputs in batches:
            recorded = zip(calls, record_calls(network, layers, inputs), strict=True)
            calls = [before + new for before, new in recorded]
    rows: list[DiagnosticRow] = []
    arrays: Arrays = {}
    for layer, layer_calls in zip(layers, calls, strict=True):
        number = numbers[layer]
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
        tokens = diagnostics.residual(layer, record, call.stream) if "residual" in kinds else {}
        if "likelihood" in kinds and layer.spec.similarity.has_logits:
            tokens["query-nll"] = diagnostics.query_likelihood(layer, record).mean(1)
        for name, value in tokens.items():
            token_values.setdefault(name, []).append(value.masked_fill(~is_attended, torch.nan))
        shown = is_attended[0]
        if "keys" in kinds and "keys" not in arrays and shown.any():
            keys = record.inputs.keys[0][:, :, shown].transpose(0, 1).flatten(0, 1)[:, :KEY_TOKENS]
            pictures = {"keys": keys, "key-weights": diagnostics.key_weights(layer)}
            arrays |= {n: array.to(torch.float32).cpu().numpy() for n, array in pictures.items()}
        if record.weights is None:
            continue
        if "rank" in kinds:
            ranks.append(diagnostics.ranks(record.weights, is_attended))
        if "maps" in kinds and "map" not in arrays and shown.any():
            weights = record.weights[0][:, shown][:, :, shown]
            pooled = F.adaptive_avg_pool2d(weights, min(MAP_SIZE, weights.shape[-1]))
            arrays["map"] = pooled.to(torch.float32).cpu().numpy()
    for name, parts in token_values.items():
        # Batches of texts differ in length.
        values += [(None, name, torch.cat([part.flatten() for part in parts]).nanmean().item())]
        values += [(None, f"{name}@1", torch.cat([p[:, 0] for p in parts]).nanmean().item())]
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


def record_calls(
    network: nn.Module, layers: list[Attention], inputs: tuple[Any, ...]
) -> list[list[LayerCall]]:
    """Run `network` on `inputs` in evaluation mode and return the calls of each layer."""
    names = {module: name for name, module in network.named_modules()}
    # The input of the block is the residual stream: it is x before the block's norm.
    parents = {layer: names[layer].rpartition(".")[0] for layer in layers}
    blocks: dict[nn.Module, nn.Module] = {m: network.get_submodule(n) for m, n in parents.items()}
    block_inputs: dict[nn.Module, Tensor] = {}
    calls: dict[nn.Module, list[LayerCall]] = {layer: [] for layer in layers}

    def record_block(block: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            block_inputs[block] = arguments[0]

    def record_layer(layer: nn.Module, positional: tuple[Any, ...], keywords: Any) -> None:
        arguments = inspect.signature(layer.forward).bind(*positional, **keywords).arguments
        arguments.pop("cache", None)
        if arguments.pop("memory", None) is not None:
            # Cross-attention has no square matrix of attention and no value of the query's token.
            return
        x = arguments["x"]
        stream = block_inputs.get(blocks[layer], x)
        calls[layer].append(LayerCall(arguments, stream if stream.shape == x.shape else x))

    hooks = [block.register_forward_pre_hook(record_block) for block in blocks.values()]
    hooks += [layer.register_forward_pre_hook(record_layer, with_kwargs=True) for layer in layers]
    modes = {module: module.training for module in network.modules()}
    try:
        # Compiled code only calls the hooks that existed when it was compiled.
        with torch.compiler.set_stance("force_eager"):
            network.eval()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return list(calls.values())


def split_calls(layer: Attention, calls: list[LayerCall]) -> Iterator[tuple[LayerCall, Tensor]]:
    """Split `calls` into float64 calls whose weights fit in memory.

    Yields each call with a boolean (B, n) that is True for tokens that some token attends to.
    """
    for call in calls:
        x = call.arguments["x"]
        batch, n = x.shape[:2]
        keys = getattr(layer.spec.similarity, "keys", 1)
        size = max(1, MAX_WEIGHTS // (layer.num_heads * keys * n * n))
        for start in range(0, batch, size):
            part = slice(start, start + size)
            arguments = call.arguments | {"x": x[part].double()}
            is_attended = torch.ones(arguments["x"].shape[:2], dtype=torch.bool, device=x.device)
            if (mask := arguments.get("attn_mask")) is not None:
                mask = mask[part] if mask.ndim == 4 and mask.shape[0] == batch else mask
                arguments["attn_mask"] = mask.double() if mask.is_floating_point() else mask
                visibility, _ = split_mask(mask)
                assert visibility is not None
                full_mask = visibility.reshape((1,) * (4 - mask.ndim) + mask.shape)
                is_attended &= full_mask.any(2).any(1)
            yield LayerCall(arguments, call.stream[part].double()), is_attended
