"""Measure memory and time of whole models.

    python experiments/released/inference_cost.py STUDY VARIANTS

MGK's Table 7 (arXiv:2110.08678) has the memory and the seconds of a test iteration of six models of
the study mgk-retrieval, with a batch of 32 pairs. An iteration is here the forward pass of one
batch without gradients. The models have random weights and read random inputs of the full length,
so no data and no training are needed. One model at a time is on the device, and the rounds take the
variants in turn, so that a change of the clock rate affects all of them.

Two files are written to --out, inference.csv and inference.md, with one row for each variant:

    parameters  trainable scalars
    memory      most bytes of tensors during an iteration: weights, input, intermediate results
    seconds     median time of an iteration over the rounds, and its interquartile range

They also state batch, tokens of a sample, precision, rounds, device and date. The page that
`python -m lit_attn.report --paper mgk` writes shows runs/bench/mgk-retrieval/inference.csv.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lit_attn.files import require_writable
from lit_attn.schema.errors import ConfigError, OneLineParser, command, from_one, require
from lit_attn.signatures import TokenSignature

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lit_attn.bench.measure import Setup, Spread
    from lit_attn.config.experiment import Experiment
    from lit_attn.data.base import Data

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Data types of matrix products under autocast; softmax and norms are computed in float32."""

TITLE = (
    "Inference of whole models with random weights, study {study}, {precision}: forward pass of "
    "{batch} samples of {tokens} tokens, {rounds} interleaved rounds. memory: most bytes of "
    "tensors, weights and input included. seconds: median ± interquartile range."
)


class Row(NamedTuple):
    """Costs of one model; `memory` in bytes, `seconds` of one batch."""

    variant: str
    parameters: int
    memory: int
    seconds: "Spread"
    batch: int
    tokens: int | None
    precision: str
    rounds: int


class Iteration:
    """Forward pass of a model, as a step that `measure_memory` accepts."""

    def __init__(self, network: "nn.Module", inputs: "tuple[Tensor, ...]", precision: str) -> None:
        self.network = network.eval()
        self.inputs = inputs
        self.precision = precision

    def forward(self) -> "Tensor":
        import torch

        device = self.inputs[0].device.type
        dtype = getattr(torch, PRECISIONS[self.precision])
        # Autocast to float32 would warn, and is no change.
        with torch.no_grad(), torch.autocast(device, dtype, enabled=self.precision != "fp32"):
            return self.network(*self.inputs)

    def backward(self, out: "Tensor") -> None:
        """Do nothing: an iteration of inference has no backward pass."""

    def count_bytes(self) -> int:
        """Return the bytes of weights, buffers and input."""
        parts = [*self.network.parameters(), *self.network.buffers(), *self.inputs]
        storages = [part.untyped_storage() for part in parts]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@command
def main(arguments: list[str] | None = None) -> int:
    """Measure the variants and write the files; return exit code 0, or 2 for wrong input."""
    raw = argparse.RawDescriptionHelpFormatter
    program = "python experiments/released/inference_cost.py"
    parser = OneLineParser(prog=program, description=__doc__, formatter_class=raw)
    parser.add_argument("study", metavar="STUDY", help="name of a study")
    parser.add_argument("variants", nargs="+", metavar="VARIANT", help="names of its variants")
    file = Path(__file__).parents[2] / "ablations.yaml"
    parser.add_argument("--file", type=Path, default=file, help="file of the studies")
    parser.add_argument(
        "--batch", type=from_one, default=32, help="samples of a batch (default 32)"
    )
    parser.add_argument(
        "--tokens", type=from_one, metavar="N", help="length instead of the study's"
    )
    text = "arithmetic (default: that of the study's evaluations)"
    parser.add_argument("--precision", choices=list(PRECISIONS), help=text)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each model")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder of both files")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        raise ConfigError("--rounds: an interquartile range needs at least 2")
    if options.out is not None:
        require_writable(options.out, "--out")
    # torch's profiler, which counts a CPU's memory, would report its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    experiments = read_experiments(options.file, options.study, options.variants, options.tokens)
    measure_variants(options, experiments)
    return 0


def read_experiments(
    file: Path, study: str, variants: list[str], tokens: int | None
) -> "dict[str, Experiment]":
    """Return the experiments of the variants, with `tokens` as their length if that is given.

    Raises ConfigError for an unknown name, and for data without a length.
    """
    from lit_attn.ablate.variants import resolve
    from lit_attn.config.study import read_studies
    from lit_attn.schema.plugins import load_parts

    studies = read_studies(file)
    require(f"{file}: no study", study, studies)
    load_parts(studies[study].parts)
    known = {variant.name: variant.experiment for variant in resolve(studies[study])}
    for name in variants:
        require(f"study '{study}' has no variant", name, known)
    experiments = {name: known[name] for name in variants}
    if tokens is None:
        return experiments
    changed = {}
    for name, experiment in experiments.items():
        if not hasattr(experiment.data, "context"):
            raise ConfigError(f"--tokens: the data of study '{study}' have no length")
        data = experiment.data.model_copy(update={"context": tokens})
        changed[name] = experiment.model_copy(update={"data": data})
    return changed


def measure_variants(options: argparse.Namespace, experiments: "dict[str, Experiment]") -> None:
    """Print the table of the variants and write it to `--out`. Raises ConfigError without a GPU."""
    import torch

    from lit_attn.bench import measure

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU")
    first = next(iter(experiments.values()))
    is_mixed = first.training.evaluation == "as-training"
    precision = options.precision or (first.training.precision if is_mixed else "fp32")
    dtype = getattr(torch, PRECISIONS[precision])
    setup = measure.Setup(device, dtype, options.rounds)
    conditions = measure.read_conditions(device, setup.clock)
    rows = measure_rows(experiments, options.batch, precision, setup)
    title = TITLE.format(
        study=options.study,
        precision=precision,
        batch=options.batch,
        tokens=rows[0].tokens,
        rounds=options.rounds,
    )
    conditions["load"] += f" to {measure.read_conditions(device, setup.clock)['load']}"
    measure.write_table(("inference", title, rows), conditions, options.out)


def measure_rows(
    experiments: "dict[str, Experiment]", batch: int, precision: str, setup: "Setup"
) -> list[Row]:
    """Return a row for each variant."""
    from lit_attn.bench import measure
    from lit_attn.models.factory import count

    seconds: dict[str, list[float]] = {name: [] for name in experiments}
    sizes: dict[str, tuple[int, int]] = {}
    for _ in range(setup.rounds):
        for name, experiment in experiments.items():
            # A model is built for its turn, so only one is on the device.
            iteration = build_iteration(experiment, batch, precision, setup.device)
            if name not in sizes:
                peak = measure.measure_memory(cast("Any", iteration), setup.device).peak
                sizes[name] = count(iteration.network), peak + iteration.count_bytes()
            calls = {name: iteration.forward}
            seconds[name] += measure.measure_seconds(calls, 1, setup.device)[name]
            del iteration, calls
    return [
        Row(
            name,
            *sizes[name],
            measure.summarize(seconds[name]),
            batch,
            experiment.data.signature().tokens,
            precision,
            setup.rounds,
        )
        for name, experiment in experiments.items()
    ]


def build_iteration(experiment: "Experiment", batch: int, precision: str, device: str) -> Iteration:
    """Return the iteration of a model with random weights on random inputs."""
    import torch

    from lit_attn.models import factory

    torch.manual_seed(0)
    network = factory.build(experiment.model, experiment.data, device)
    return Iteration(network.to(device), draw_inputs(experiment.data, batch, device), precision)


def draw_inputs(data: "Data", batch: int, device: str) -> "tuple[Tensor, ...]":
    """Return random inputs of a network: token ids, a mask without padding, or numbers."""
    import torch

    signature = data.signature()
    inputs = []
    for part in signature.sample():
        shape = (batch, *part.shape[1:])
        if part.dtype == torch.bool:
            inputs.append(torch.ones(shape, dtype=part.dtype, device=device))
        elif part.dtype == torch.long:
            assert isinstance(signature, TokenSignature)
            inputs.append(torch.randint(signature.vocabulary, shape, device=device))
        else:
            inputs.append(torch.randn(shape, dtype=part.dtype, device=device))
    return tuple(inputs)


if __name__ == "__main__":
    sys.exit(main())
