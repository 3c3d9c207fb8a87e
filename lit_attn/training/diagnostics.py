"""Diagnostics of the attention layers, recorded during training without changing it.

docs/diagnostics.md explains the quantities. Shapes: B batch, n tokens, d width, H heads.
"""

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
from lit_attn.attention.layer import Attention, LayerRecord, TokenLayer
from lit_attn.attention.masks import split_mask
from lit_attn.attention.rotary import Rotary
from lit_attn.attention.shared_keys import KeysValues
from lit_attn.cells.rows import DiagnosticRow, csv_lines, read_diagnostics
from lit_attn.config.training import SAMPLED_KINDS, DiagnosticsConfig
from lit_attn.files import append, write_atomic
from lit_attn.models.sharding import gathered_weights, is_sharded
from lit_attn.private_names.of_torch import copy_without_hooks
from lit_attn.training.board_images import draw_maps
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
    Rank 0 computes them; the ranks of a sharded network give it their parts of the weights.
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
        if not trainer.is_global_zero or dataloader_idx != 0:
            return
        is_due = self._is_due(trainer.global_step)
        collected = sum(len(parts[0]) for parts in self.batches)
        missing = self.settings.samples - collected
        if is_due and missing > 0:
            self.batches.append(_first_samples(module.inputs(batch), missing))

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.settings.first_epoch_every
        if every is None or trainer.current_epoch > 0:
            return
        step = trainer.global_step
        is_step_end = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        # The evaluation after the last step of an epoch records that step.
        is_evaluated = step % self.interval == 0
        if is_step_end and step % every == 0 and not is_evaluated:
            if trainer.is_global_zero:
                self.batches = [_first_samples(module.inputs(batch), self.settings.samples)]
            self._record(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if self._is_due(trainer.global_step):
            self._record(trainer, module)

    def _is_due(self, step: int) -> bool:
        """Return True if the evaluation after `step` steps has diagnostics."""
        evaluation = step // self.interval
        return step >= self.total or evaluation % self.settings.every == 0

    def _record(self, trainer: L.Trainer, module: Any) -> None:
        """Write the diagnostics of the collected batches on rank 0."""
        if not trainer.is_global_zero and not is_sharded(module.network):
            return
        with gathered_weights(module.network):
            if self.batches:
                self._write(module.network, trainer.global_step)

    def _write(self, network: nn.Module, step: int) -> None:
        """Write the diagnostics of the collected batches, and forget the batches."""
        started = time.perf_counter()
        rows, arrays = diagnose(network, self.batches, self.settings, step)
        self.batches = []
        append(self.path, csv_lines(rows))
        self._add_scalars(rows, step)
        if step >= self.total and arrays:
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)  # type: ignore[arg-type]  # no bool
            write_atomic(self.arrays, content.getvalue())
            self._add_maps(arrays, step)
        self.times.append(time.perf_counter() - started)

    def _add_scalars(self, rows: list[DiagnosticRow], step: int) -> None:
        """Write the mean over heads of each diagnostic of each layer for TensorBoard."""
        values_by_name: dict[str, list[float]] = {}
        for row in rows:
            # TensorBoard sorts the names: these come after test, train and val.
            name = f"within-layers/{row.name}/{row.layer}"
            values_by_name.setdefault(name, []).append(row.value)
        for name, values in values_by_name.items():
            mean = math.fsum(values) / len(values)
            self.metrics.events.add_scalar(name, mean, step)

    def _add_maps(self, arrays: Arrays, step: int) -> None:
        """Write the attention maps of each layer for TensorBoard."""
        for name, maps in arrays.items():
            kind, _, layer = name.partition(".")
            if kind == "map":
                picture = draw_maps(maps)
                events = self.metrics.events
                events.add_image(f"attention/layer-{layer}", picture, step, dataformats="HW")


def _first_samples(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return the first `count` samples of each of the network's inputs."""
    return tuple(part[:count] for part in inputs)


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
            new_calls = record_calls(network, layers, inputs)
            for layer_calls, new in zip(calls, new_calls, strict=True):
                layer_calls.extend(new)
    rows: list[DiagnosticRow] = []
    arrays: Arrays = {}
    for layer, layer_calls in zip(layers, calls, strict=True):
        number = numbers[layer]
        # One layer at a time: a float64 copy of all layers would triple the network's memory.
        float64_layer = copy_without_hooks(layer).double()
        values, layer_arrays = _diagnose_layer(float64_layer, layer_calls, settings.kinds)
        rows += [DiagnosticRow(step, number, *value) for value in values]
        for name, array in layer_arrays.items():
            arrays[f"{name}.{number}"] = array
    return NetworkDiagnostics(rows, arrays)


class LayerValue(NamedTuple):
    """Value of one diagnostic of a layer; `head` counts from 1, None is the complete layer."""

    head: int | None
    name: str
    value: float


def _diagnose_layer(
    layer: Attention, calls: list[LayerCall], kinds: tuple[str, ...]
) -> tuple[list[LayerValue], Arrays]:
    """Return the finite diagnostics of a float64 layer, and the arrays."""
    samples = LayerSamples(layer, kinds)
    for call, is_attended in split_calls(layer, calls):
        samples.add(call, is_attended)
    values = samples.summarise_tokens() + samples.summarise_ranks()
    if "heads" in kinds:
        for name, share in diagnostics.captured_variance(layer).items():
            values.append(LayerValue(None, f"captured-{name}", share))
    if "mixture" in kinds:
        values += _list_priors(layer)
    finite_values = [value for value in values if math.isfinite(value.value)]
    return finite_values, samples.arrays


class LayerSamples:
    """Diagnostics of a float64 layer that need samples, collected call by call."""

    def __init__(self, layer: Attention, kinds: tuple[str, ...]) -> None:
        self.layer = layer
        self.kinds = kinds
        self.arrays: Arrays = {}
        self.token_values: dict[str, list[Tensor]] = {}
        self.ranks: list[Tensor] = []

    def add(self, call: LayerCall, is_attended: Tensor) -> None:
        """Add the diagnostics of a call, whose tokens (B, n) are attended to or not."""
        record = self.layer.record(**call.arguments)
        self._add_token_values(record, call, is_attended)
        is_shown = is_attended[0]
        if "keys" in self.kinds and "keys" not in self.arrays and is_shown.any():
            self._add_keys(record, is_shown)
        if record.weights is None:
            return
        if "rank" in self.kinds:
            self.ranks.append(diagnostics.ranks(record.weights, is_attended))
        if "maps" in self.kinds and "map" not in self.arrays and is_shown.any():
            weights = record.weights[0][:, is_shown][:, :, is_shown]
            size = min(MAP_SIZE, weights.shape[-1])
            self.arrays["map"] = _to_float32(F.adaptive_avg_pool2d(weights, size))

    def _add_token_values(self, record: LayerRecord, call: LayerCall, is_attended: Tensor) -> None:
        """Add the quantities of each token (B, n), NaN where no token attends to it."""
        values: dict[str, Tensor] = {}
        if "residual" in self.kinds:
            values = diagnostics.residual(self.layer, record, call.stream)
        if "likelihood" in self.kinds and self.layer.spec.similarity.has_logits:
            values["query-nll"] = diagnostics.query_likelihood(self.layer, record).mean(1)
        for name, value in values.items():
            attended_value = value.masked_fill(~is_attended, torch.nan)
            self.token_values.setdefault(name, []).append(attended_value)

    def _add_keys(self, record: LayerRecord, is_shown: Tensor) -> None:
        """Add W_K, if there is one, and the keys of the first sample's tokens that are shown."""
        keys = record.inputs.keys[0][:, :, is_shown]
        keys_by_head = keys.transpose(0, 1).flatten(0, 1)
        self.arrays["keys"] = _to_float32(keys_by_head[:, :KEY_TOKENS])
        if self.layer.projects_keys:
            self.arrays["key-weights"] = _to_float32(diagnostics.key_weights(self.layer))

    def summarise_tokens(self) -> list[LayerValue]:
        """Return the mean of each quantity over all tokens, and over the first ones (`@1`)."""
        values = []
        for name, parts in self.token_values.items():
            # Batches of texts differ in length.
            all_tokens = torch.cat([part.flatten() for part in parts])
            first_tokens = torch.cat([part[:, 0] for part in parts])
            values.append(LayerValue(None, name, all_tokens.nanmean().item()))
            values.append(LayerValue(None, f"{name}@1", first_tokens.nanmean().item()))
        return values

    def summarise_ranks(self) -> list[LayerValue]:
        """Return the mean rank of each head, and keep the ranks of all samples as an array."""
        if not self.ranks:
            return []
        ranks = torch.cat(self.ranks)
        self.arrays["rank"] = ranks.to(torch.int32).cpu().numpy()
        means = ranks.double().mean(0).tolist()
        return [LayerValue(head, "rank", mean) for head, mean in enumerate(means, start=1)]


def _list_priors(layer: Attention) -> list[LayerValue]:
    """Return the mixture's mean prior pi, of every head or shared by all heads."""
    pi = layer.similarity.mean_prior()
    if pi is None:
        return []
    has_heads = len(pi) == layer.query_heads
    values = []
    for number, head_pi in enumerate(pi.tolist(), start=1):
        head = number if has_heads else None
        for r, value in enumerate(head_pi, start=1):
            values.append(LayerValue(head, f"pi-{r}", value))
    return values


def _to_float32(values: Tensor) -> "np.ndarray[Any, Any]":
    """Return a tensor of any device as a float32 array."""
    return values.to(torch.float32).cpu().numpy()


def record_calls(
    network: nn.Module, layers: list[Attention], inputs: tuple[Any, ...]
) -> list[list[LayerCall]]:
    """Run `network` on `inputs` in evaluation mode and return the calls of each layer."""
    names = {module: name for name, module in network.named_modules()}
    # The input of the block is the residual stream: it is x before the block's norm.
    blocks: dict[nn.Module, nn.Module] = {}
    for layer in layers:
        parent_name, _, _ = names[layer].rpartition(".")
        blocks[layer] = network.get_submodule(parent_name)
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
        assert isinstance(layer, Attention)
        if layer.spec.values.reads_first and not layer.is_first:
            assert layer.first_values is not None
            arguments["first_values"] = layer.first_values.read()
        if layer.spec.shares_keys:
            assert layer.shared_keys is not None
            arguments["keys_values"] = layer.shared_keys.read()
        x = arguments["x"]
        stream = block_inputs.get(blocks[layer], x)
        if stream.shape != x.shape:
            stream = x
        calls[layer].append(LayerCall(arguments, stream))

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
        weights_per_sample = layer.query_heads * keys * n * n
        size = max(1, MAX_WEIGHTS // weights_per_sample)
        for start in range(0, batch, size):
            part = slice(start, start + size)
            arguments = dict(call.arguments)
            for name in ("x", "first_values", "added_values"):
                if arguments.get(name) is not None:
                    arguments[name] = arguments[name][part].double()
            keys_values = arguments.get("keys_values")
            if keys_values is not None:
                of_part = [tensor[part].double() for tensor in keys_values]
                arguments["keys_values"] = KeysValues(*of_part)
            is_attended = torch.ones(arguments["x"].shape[:2], dtype=torch.bool, device=x.device)
            mask = arguments.get("attn_mask")
            if mask is not None:
                if mask.ndim == 4 and mask.shape[0] == batch:
                    mask = mask[part]
                is_attended &= _find_attended(mask)
                if mask.is_floating_point():
                    mask = mask.double()
                arguments["attn_mask"] = mask
            rotary = arguments.get("rotary")
            if rotary is not None and rotary.cos.ndim == 4 and rotary.cos.shape[0] == batch:
                arguments["rotary"] = Rotary(rotary.cos[part], rotary.sin[part])
            yield LayerCall(arguments, call.stream[part].double()), is_attended


def _find_attended(mask: Tensor) -> Tensor:
    """Return True for tokens that some token attends to, (B or 1, n), from an attention mask."""
    visibility, _ = split_mask(mask)
    assert visibility is not None
    added_axes = (1,) * (4 - mask.ndim)
    visible = visibility.reshape(added_axes + mask.shape)
    return visible.any(2).any(1)
