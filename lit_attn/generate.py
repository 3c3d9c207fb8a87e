"""Text from a trained language model: `python -m lit_attn.generate RUN --prompt TEXT`.

RUN is the folder of a finished cell, runs/STUDY/VARIANT/SEED-IDENTITY. The text appears as it is
drawn, after the prompt, and ends after --tokens tokens or where the model ends the document.
"""

import argparse
import os
import pickle
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.config.cell import Cell
from lit_attn.config.data.text import Tokens
from lit_attn.schema.errors import ConfigError

if TYPE_CHECKING:
    from lit_attn.data.text.tokenizers import Encoder
    from lit_attn.models.gpt import GPT

TOKENS = 200


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 with a text, 2 for what cannot be had, 130 when interrupted.

    And 141 where whoever reads it, as `head` does, stops.
    """
    options = _parser().parse_args(arguments)
    try:
        for text in generate(options):
            print(text, end="", flush=True)
        print(flush=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:
        # At exit Python would flush into the closed pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def generate(options: argparse.Namespace) -> Iterator[str]:
    """The prompt as the model reads it, then its continuation piece by piece.

    Raises ConfigError, before anything is computed, for a run or an option that will not do.
    """
    _check(options)
    cell = Cell.read(options.run / "config.yaml")
    data = cell.experiment.data
    if not isinstance(data, Tokens):
        raise ConfigError(
            f"{options.run}: its task is {cell.experiment.task}; text is what language-modelling "
            "learns"
        )

    from lit_attn.data.text.corpus import text_encoder
    from lit_attn.models.gpt import Sampling, continuation

    network = trained(options.run, cell)
    encoder = text_encoder(data)
    try:
        prompt = encoder.prompt(options.prompt)
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}") from error
    if not prompt:
        raise ConfigError("--prompt: is empty; the model needs a token to go on from")
    count = _room(len(prompt), options.tokens, network.trunk.longest)
    how = Sampling(options.temperature, options.top_k, options.seed)
    ids = continuation(network, prompt, count, data.tokenizer.vocabulary, how)
    yield from pieces(encoder, prompt, ids)


def trained(run: Path, cell: Cell) -> "GPT":
    """The cell's network with the weights that training left, ready to be evaluated.

    Raises ConfigError where there are none, or others than the cell's.
    """
    path = run / "checkpoints" / "weights.pt"
    if not path.exists():
        raise ConfigError(f"{path}: is missing; a cell leaves its weights there when it finishes")

    import torch

    from lit_attn.models import budget
    from lit_attn.models.gpt import GPT

    device = "cuda" if torch.cuda.is_available() else "cpu"
    experiment = cell.experiment
    model = budget.resolve(experiment.model, cell.match_to, experiment.data)
    network = budget.build(model, experiment.data, device)
    assert isinstance(network, GPT)
    try:
        network.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    except (OSError, EOFError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: are not the weights of this cell ({reason})") from error
    return network.eval()


def pieces(encoder: "Encoder", prompt: list[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of `prompt`, then what each id adds to it, up to the end of the document.

    Half a character waits for its other half.
    """
    so_far, written = list(prompt), encoder.decode(prompt)
    yield written
    for number in ids:
        if number == encoder.end:
            break
        so_far.append(number)
        text = encoder.decode(so_far)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(written) :]
            written = text
    yield encoder.decode(so_far)[len(written) :]


def _check(options: argparse.Namespace) -> None:
    if options.tokens is not None and options.tokens < 1:
        raise ConfigError(f"--tokens: {options.tokens} is less than 1")
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature: {options.temperature} is not 0 or a positive number")
    if options.top_k is not None and options.top_k < 1:
        raise ConfigError(f"--top-k: {options.top_k} is less than 1")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("--prompt: is not UTF-8") from error


def _room(prompt: int, asked: int | None, longest: int | None) -> int:
    """How many tokens to draw; ConfigError for more than there are learned positions.

    The last one drawn needs none.
    """
    if longest is None:
        return asked or TOKENS
    room = longest - prompt + 1
    if room < 1:
        raise ConfigError(
            f"--prompt: has {prompt:,} tokens, more than the {longest:,} positions this model "
            "learned"
        )
    if asked is not None and asked > room:
        raise ConfigError(
            f"--tokens: {asked:,} after a prompt of {prompt:,} are more than the {longest:,} "
            f"positions this model learned; at most {room:,}"
        )
    return asked or min(TOKENS, room)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lit_attn.generate", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished cell")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    tokens = f"at most so many; {TOKENS}, or as many as the model has positions for, by default"
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    temperature = "0 takes the likeliest token every time; 1 by default"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help=temperature)
    top_k = "draw among the K likeliest tokens; all by default"
    parser.add_argument("--top-k", type=int, metavar="K", help=top_k)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="0 by default")
    return parser


if __name__ == "__main__":
    sys.exit(main())
