"""Check of cells before the first one: what can be built, and one training step on real data.

The step needs the network in memory, the first training batch, and a batch of each evaluated split.
Its learning rate is zero, so only a mistake makes the loss or an evaluation not finite. Cells that
differ in nothing that a step computes share one (`describe_step` of lit_attn.ablate.model_check).
"""

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from lit_attn.attention import flex_support
from lit_attn.cells.failure import NO_SPACE, OUT_OF_MEMORY, Diverged
from lit_attn.checks import layers
from lit_attn.config.cell import Cell
from lit_attn.config.experiment import Experiment
from lit_attn.data.base import Data, find_paths
from lit_attn.data.module import DataModule, EvaluationLoader
from lit_attn.models import factory
from lit_attn.models.base import Model
from lit_attn.models.network_trial import try_network
from lit_attn.models.own_trial import has_gpu_mixers, try_gpu_mixers
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.mistakes import describe_mistake
from lit_attn.schema.plugins import (
    explain_failure,
    find_class_line,
    find_own_line,
    is_own_mistake,
)
from lit_attn.tasks.tf32 import products_in_tf32
from lit_attn.temporary import temporary_folder
from lit_attn.training.build import (
    build_data,
    build_task,
    prepare_for_devices,
    require_selection,
)
from lit_attn.training.callback_checks import (
    check_callbacks,
    describe_loop,
    list_parameters,
    require_same_loop,
)
from lit_attn.training.checkpoints import MACHINE_ERRORS
from lit_attn.training.compilation import should_compile
from lit_attn.training.process_group import ProcessGroup, choose_device
from lit_attn.training.recording import MetricsFile
from lit_attn.training.result import SMOKE_LIMITS
from lit_attn.training.several_devices import require_gradients
from lit_attn.training.trainer import make_trainer
from lit_attn.training.trainer_data import TrainerData

LOG = logging.getLogger(__name__)
"""Logger of checks that cannot be made, whose warnings the runner shows (`collect_warnings`)."""


class Mistake(NamedTuple):
    """Number of the first cell that cannot run, its error, and the traceback of foreign code.

    `is_own` is True for a mistake of lit_attn, whose message names the file with the traceback.
    """

    number: int
    message: str
    traceback: str = ""
    is_own: bool = False


@dataclass
class FirstBatch:
    """Loader of the first batch of training or of a split, which is read once for all cells."""

    batch: Any
    loader: EvaluationLoader | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch])

    def count_samples(self, number: int) -> int:
        """Return the number of rows of the batch of a split that are not padding."""
        assert self.loader is not None
        return self.loader.count_samples(number)


class FirstBatches(TrainerData):
    """Data module of the first batches of `data`, whose hooks change a batch as in a cell."""

    def __init__(
        self, data: DataModule, training: FirstBatch, evaluation: list[FirstBatch]
    ) -> None:
        super().__init__(data)
        self.training = training
        self.evaluation = evaluation

    def setup(self, stage: str) -> None:
        """Leave the data without a trainer."""

    def train_dataloader(self) -> Any:
        return self.training

    def val_dataloader(self) -> Any:
        return self.evaluation

    def teardown(self, stage: str) -> None:
        """Do nothing: no worker has started."""


class UsedBatch(L.Callback):
    """Callback that notes the batch that a step uses, and of what it is."""

    name = ""
    batch: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, _: int) -> None:
        self.name = "training batch"
        self.batch = batch

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, split: int = 0
    ) -> None:
        self.name = f"batch of {module.splits[split]}"
        self.batch = batch


class LoadedData:
    """Data of the cell that was checked last, which the next cell often has too."""

    def __init__(self) -> None:
        self.config: Data | None = None
        self.module: DataModule | None = None
        self.training: FirstBatch | None = None
        self.evaluation: list[FirstBatch] = []

    def find(self, cell: Cell) -> DataModule:
        """Return the checked data of `cell`. Raises ConfigError if they cannot be used."""
        if self.module is None or self.config != cell.experiment.data:
            module = build_data(cell, torch.device("cpu"))
            self.config = cell.experiment.data
            self.module = module
            self.training = None
            module.check()
        return self.module

    def read_batches(self, data: DataModule) -> tuple[FirstBatch, list[FirstBatch]]:
        """Return the first micro-batch of training, and the first batch of each split."""
        if self.training is None:
            self.training = FirstBatch(next(iter(data.finish(data.batch(0)))))
            self.evaluation = []
            for loader in data.val_dataloader():
                self.evaluation.append(FirstBatch(next(iter(loader)), loader))
            data.stop_workers()
        return self.training, self.evaluation


def find_mistake(
    cells: Sequence[Any],
    has_data: bool = True,
    start_cell: Callable[[int], None] = lambda number: None,
    untried: Collection[int] = (),
    selects: Mapping[int, Sequence[str]] | None = None,
) -> Mistake | None:
    """Return the first of `cells` that cannot run, or None.

    `cells` has the content of each config.yaml. Unless this machine `has_data`, only the model of a
    cell whose files are missing is checked. `start_cell` is called with the number of each cell
    before its check. The cells with the numbers `untried` make a training step. `selects` has the
    names of the metrics by which the study of a cell selects, by its number. Any other exception
    than a ConfigError ends the check of a cell with a warning: if foreign code raises it, the log
    of the cell will show it.
    """
    loaded = LoadedData()
    selects = selects or {}
    for number, written in enumerate(cells):
        start_cell(number)
        names = selects.get(number, ())
        mistake = _check_cell(number, written, loaded, has_data, number in untried, names)
        if mistake is not None:
            return mistake
    return None


def _check_cell(
    number: int,
    written: Any,
    loaded: LoadedData,
    has_data: bool,
    is_untried: bool,
    selects: Sequence[str],
) -> Mistake | None:
    """Return what is wrong with a cell, or None; see `find_mistake`."""
    try:
        cell = Cell.parse(written, "config.yaml")
        experiment = cell.experiment
        training = experiment.training
        data = None
        if has_data or _has_all_files(experiment.data):
            data = loaded.find(cell)
        if has_data and has_gpu_mixers(experiment.model):
            # Without the data, this machine is not the one that trains the cell.
            device = choose_device(training.accelerator, 0, 1)
            signature = experiment.data.signature()
            try_gpu_mixers(experiment.model, signature, training.precision, device)
        model = factory.resolve(experiment.model, cell.match_to, experiment.data)
        network = _build_without_memory(model, experiment)
        if data is None:
            return None
        require_selection(selects, build_task(cell, data, network))
        if not has_data or not is_untried:
            return None
        device = choose_device(training.accelerator, 0, 1)
        should_compile(experiment, device)
        try_network(model, experiment.data, device)
        if layers.needs_comparison(device):
            layers.require_formulas(model, experiment.data, training.precision, device)
    except ConfigError as error:
        return Mistake(number, str(error))
    except Exception as error:
        reason = explain_failure(error, "the code of the cell")
        LOG.warning("the check of a variant ended early: %s", reason)
        return None
    return _try_step(number, cell, model, data, loaded, device)


def _build_without_memory(model: Model, experiment: Experiment) -> nn.Module:
    """Return the network of `model` on the meta device. Raises ConfigError if it cannot train."""
    network = factory.build(model, experiment.data, "meta")
    prepare_for_devices(network, experiment.training)
    require_gradients(network, experiment.data.signature().sample(), experiment.training)
    return network


def _has_all_files(data: Data) -> bool:
    """Return True if this machine has every file and folder that `data` names."""
    return all(path.exists() for _, path in find_paths(data.model_dump()))


def _try_step(
    number: int,
    cell: Cell,
    model: Model,
    data: DataModule,
    loaded: LoadedData,
    device: torch.device,
) -> Mistake | None:
    """Return what is wrong with a training step and an evaluation of `cell`, or None."""
    if cell.experiment.training.is_sharded:
        # Only all devices together have the memory, and they are started with the cell.
        return None
    used = UsedBatch()
    try:
        make_step(cell, model, data, loaded, device, used)
    except ConfigError as error:
        return Mistake(number, str(error))
    except Diverged as error:
        return Mistake(number, _explain_not_finite(str(error), cell, model, data, loaded, device))
    except Exception as error:
        if is_of_machine(error):
            _warn_unchecked(error)
            return None
        is_own = is_own_mistake(error)
        message = f"the first step: {describe_mistake(error)}" if is_own else _explain(error)
        if used.name:
            batch = describe_batch(used.batch, data.signature.batch_names)
            message += f"; the {used.name} is {batch}"
        return Mistake(number, message, "" if is_own else traceback.format_exc(), is_own)
    return None


def is_of_machine(error: Exception) -> bool:
    """Return True for an exception about the machine at this moment; the cells may not meet it."""
    text = str(error)
    lacks_room = OUT_OF_MEMORY.search(text) or NO_SPACE.search(text)
    return isinstance(error, (OSError, *MACHINE_ERRORS)) or bool(lacks_room)


def _warn_unchecked(error: Exception) -> None:
    """Warn that the machine cannot make the step of a cell now; the cell may meet another state."""
    reason = str(error).strip().partition("\n")[0]
    LOG.warning("the first step of a variant was not checked: %s: %s", type(error).__name__, reason)


def make_step(
    cell: Cell,
    model: Model,
    data: DataModule,
    loaded: LoadedData,
    device: torch.device,
    used: UsedBatch,
    prepare: Callable[[nn.Module], object] = lambda network: None,
) -> None:
    """Make a training step of `cell` with the learning rate zero, and evaluate a batch of a split.

    `model` has the FFN width of the cell. `used` notes the batches, and `prepare` gets the network
    before the step. Raises what the code of the cell raises.
    """
    experiment = cell.experiment
    training = experiment.training
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if device.type == "cuda":
        # The network of the last cell is in cycles of references with its trainer.
        gc.collect()
        torch.cuda.empty_cache()
    L.seed_everything(cell.seed, verbose=False)
    network = factory.build(model, experiment.data)
    prepare(network)
    task = build_task(cell, data, network)
    task.rate = lambda step: 0.0
    batches, evaluation = loaded.read_batches(data)
    own_callbacks = [callback.build() for callback in training.callbacks]
    task.has_callbacks = bool(own_callbacks)
    with (
        products_in_tf32(training.precision == "tf32"),
        # Its kernels are compiled, which takes seconds for each layer.
        flex_support.left_out(),
        temporary_folder() as folder,
    ):
        metrics = MetricsFile(folder / "metrics.csv", lambda: 0.0)
        metrics.start(0)
        trainer = make_trainer(
            training,
            task,
            ProcessGroup(0, 1, device),
            folder,
            steps=1,
            epochs=1,
            micro_batches=1,
            limits=SMOKE_LIMITS,
            loggers=[metrics],
            callbacks=[used, *own_callbacks],
        )
        loop = describe_loop(trainer)
        parameters = list_parameters(task)
        try:
            trainer.fit(task, FirstBatches(data, batches, evaluation))
        finally:
            metrics.events.close()
            # A changed loop is the reason of any other error.
            require_same_loop(trainer, loop)
        check_callbacks(training.callbacks, own_callbacks, trainer, parameters)


def _explain_not_finite(
    message: str,
    cell: Cell,
    model: Model,
    data: DataModule,
    loaded: LoadedData,
    device: torch.device,
) -> str:
    """Return the error of a loss that is not finite, with the first module that made it so."""
    outputs: list[tuple[str, nn.Module, bool]] = []

    def prepare(network: nn.Module) -> None:
        for name, module in network.named_modules():
            module.register_forward_hook(_make_hook(name, outputs))

    # The step fails again, this time with the hooks.
    with contextlib.suppress(Diverged, OSError, *MACHINE_ERRORS):
        make_step(cell, model, data, loaded, device, UsedBatch(), prepare)
    # An infinite number can be meant, as in a mask; a NaN is not.
    first = next((entry for entry in outputs if entry[2]), next(iter(outputs), None))
    if first is None:
        return f"the first step: {message}, although the output of every module is finite"
    name, module, _ = first
    place = find_class_line(type(module))
    return (
        f"model: {message}; the first module whose output is not finite is"
        f" '{name or 'the network'}' ({type(module).__name__}{place and ', '}{place})"
    )


def _make_hook(name: str, outputs: list[tuple[str, nn.Module, bool]]) -> Callable[..., None]:
    """Return a forward hook that appends its module to `outputs` if its output is not finite."""

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        for tensor in tensors:
            is_number = isinstance(tensor, Tensor) and tensor.is_floating_point()
            if is_number and not tensor.isfinite().all():
                outputs.append((name, module, bool(tensor.isnan().any())))

    return look


def _explain(error: Exception) -> str:
    """Return an exception of a step in one line, with the user's file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = find_own_line(error)
    note = ""
    if place is None:
        place = f"{frames[-1].filename}:{frames[-1].lineno}"
        note = " (no file of `parts` is on the way)"
    message = " ".join(str(error).split())
    return f"the first step: {place}: {type(error).__name__}: {message}{note}"


def describe_batch(batch: Any, names: tuple[str, ...]) -> str:
    """Return the parts of a batch with their `names` and shapes, as `images (64, 1, 8, 8)`."""
    if isinstance(batch, dict):
        parts = batch
    else:
        entries = batch if isinstance(batch, tuple | list) else [batch]
        names += tuple(f"entry {number + 1}" for number in range(len(names), len(entries)))
        parts = dict(zip(names, entries, strict=False))
    words = []
    for name, value in parts.items():
        is_list = isinstance(value, list | tuple)
        size = plural(len(value), "item") if is_list else tuple(getattr(value, "shape", ()))
        words.append(f"{name} {size}")
    return ", ".join(words)
