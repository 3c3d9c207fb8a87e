"""Generate text with a trained language model.

RUN is the folder of a finished cell, runs/STUDY/VARIANT/SEED-IDENTITY. The text is printed token by
token after the prompt. It ends after --tokens tokens or with the model's end-of-document token. For
a study, runs/STUDY, the first finished cell of each variant writes a text. The texts are kept in
samples.json beside its plan, and the next report shows them on its page.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.schema.errors import (
    ConfigError,
    OneLineParser,
    command,
    escape_control,
    from_one,
    program,
)
from lit_attn.schema.trust import TRUST_HELP

if TYPE_CHECKING:
    from lit_attn.config.cell import Cell
    from lit_attn.data.text.tokenizers import Encoder
    from lit_attn.models.language import GPT
    from lit_attn.signatures import TokenStream

TOKENS = 200
"""Number of tokens to generate by default."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, 2 for a wrong run or option, 130 interrupted, 141 without a reader."""
    is_terminal = sys.stdout.isatty()
    options = _make_parser().parse_args(arguments)
    is_study = (options.run / "plan.json").exists()
    for text in generate_each(options) if is_study else generate(options):
        # The weights may be those of somebody else.
        printed = escape_control(text) if is_terminal else text
        print(printed, end="", flush=True)
    print(flush=True)
    return 0


def _make_parser() -> OneLineParser:
    """Return the parser of the command's options."""
    parser = OneLineParser(program("generate"), page="own-text.md", description=__doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a finished cell, or of a study")
    add("--prompt", required=True, metavar="TEXT", help="beginning of the text")
    add(
        "--tokens",
        type=from_one,
        metavar="N",
        help=f"number of tokens (default {TOKENS}, or fewer if the model has fewer positions)",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        default=1.0,
        help="temperature (default 1); 0 always takes the most likely token",
    )
    add(
        "--top-k",
        type=from_one,
        metavar="K",
        help="draw among the K most likely tokens (default: all)",
    )
    add("--seed", type=int, metavar="S", default=0, help="random seed (default 0)")
    add("--trust-code", action="store_true", help=TRUST_HELP)
    return parser


def generate(options: argparse.Namespace) -> Iterator[str]:
    """Yield the prompt as the model reads it, then its continuation; ConfigError if unusable."""
    # Imported here, because --help imports no PyTorch.
    from lit_attn.config.cell import Cell

    _check(options)
    path = options.run / "config.yaml"
    with Cell.open_foreign(path, is_trusted=options.trust_code) as cell:
        signature = _read_signature(options.run, cell)
        # Data outside the package can have token streams that are no text.
        make_encoder = getattr(cell.experiment.data, "encoder", None)
        if make_encoder is None:
            kind = cell.experiment.data.kind
            raise ConfigError(f"{options.run}: its data '{kind}' has no tokenizer.")
        network = load_gpt(options.run, cell)
        encoder: Encoder = make_encoder()
    try:
        prompt = encoder.prompt(options.prompt)
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}") from error
    if not prompt:
        raise ConfigError("--prompt: is empty. The model needs at least one token.")

    from lit_attn.models.language import Sampling, continuation

    count = _count_tokens(len(prompt), options.tokens, network.trunk.max_tokens)
    sampling = Sampling(options.temperature, options.top_k, options.seed)
    ids = continuation(network, prompt, count, signature.vocabulary, sampling)
    yield from decode_pieces(encoder, prompt, ids)


def generate_each(options: argparse.Namespace) -> Iterator[str]:
    """Yield the name and the text of one finished cell of each variant; then write samples.json.

    Raises ConfigError if the study has no finished cell, or if one of these cells is unusable.
    """
    # Imported here, because --help imports no pandas.
    from lit_attn.cells.samples import SAMPLES_FILE, Sample, Samples
    from lit_attn.report.records.read import read_studies

    folder = options.run.resolve()
    (study,) = read_studies(folder.parent, [folder.name])
    samples: list[Sample] = []
    for variant in study.plan.variants:
        cells = study.variant_cells(variant.name)
        finished = [cell for cell in cells if cell.status == "done"]
        if not finished:
            continue
        cell = finished[0]
        of_cell = argparse.Namespace(**vars(options) | {"run": Path(cell.path)})
        pieces = generate(of_cell)
        # It is the prompt; a cell that is unusable has none, and no heading.
        text = next(pieces)
        heading = f"== {variant.label or variant.name}, seed {cell.seed}\n"
        yield "\n\n" * bool(samples) + heading + text
        for piece in pieces:
            text += piece
            yield piece
        sample = Sample(variant=cell.variant, seed=cell.seed, identity=cell.identity, text=text)
        samples.append(sample)
    if not samples:
        raise ConfigError(f"{options.run}: no cell of this study has a result yet")
    Samples(
        temperature=options.temperature, top_k=options.top_k, seed=options.seed, samples=samples
    ).write(folder / SAMPLES_FILE)


def _read_signature(run: Path, cell: "Cell") -> "TokenStream":
    """Return the signature of the cell's data; ConfigError if the cell has no language model."""
    # Imported here, because --help imports no PyTorch.
    from lit_attn.signatures import TokenStream

    experiment = cell.experiment
    signature = experiment.data.signature()
    if not isinstance(signature, TokenStream):
        raise ConfigError(
            f"{run}: its task is {experiment.task.kind}. "
            "Choose a run of the task language-modelling."
        )
    return signature


def load_gpt(run: Path, cell: "Cell") -> "GPT":
    """Return the cell's network with its trained weights; ConfigError if it is no GPT."""
    import torch

    from lit_attn.hub.folder import load_network
    from lit_attn.models.language import GPT

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_network(run / "checkpoints" / "weights.pt", cell, device)
    if not isinstance(network, GPT):
        raise ConfigError(f"{run}: the model is '{cell.experiment.model.kind}'; needed is gpt")
    return network


def decode_pieces(encoder: "Encoder", prompt: list[int], ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of `prompt`, then what each id adds, by complete characters, up to the end."""
    all_ids = list(prompt)
    text = encoder.decode(prompt)
    yield text
    for token_id in ids:
        if token_id == encoder.end:
            break
        all_ids.append(token_id)
        longer_text = encoder.decode(all_ids)
        if not longer_text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield longer_text[len(text) :]
            text = longer_text
    yield encoder.decode(all_ids)[len(text) :]


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that cannot be used with any model."""
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature: {options.temperature} is not a number from 0 on")
    # Imported here, because --help imports no PyTorch.
    from lit_attn.config.cell import LARGEST_SEED

    if not 0 <= options.seed <= LARGEST_SEED:
        raise ConfigError(f"--seed: {options.seed} is not a number from 0 to {LARGEST_SEED}")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt: is not UTF-8") from error


def _count_tokens(prompt: int, requested: int | None, positions: int | None) -> int:
    """Return the number of tokens to generate; ConfigError if they exceed the `positions`."""
    # The last token needs no position.
    limit = float("inf") if positions is None else positions - prompt + 1
    if limit < 1:
        raise ConfigError(
            f"--prompt: has {prompt:,} tokens. The model has learned {positions:,} positions."
        )
    if requested is not None and requested > limit:
        raise ConfigError(
            f"--tokens: {requested:,} after a prompt of {prompt:,} exceed the {positions:,} "
            f"positions that the model has learned. Choose at most {limit:,}."
        )
    return requested or int(min(TOKENS, limit))
