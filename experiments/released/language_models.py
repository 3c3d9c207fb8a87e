"""Trained language models for the scripts beside this file: network, encoder and their checks.

A model is the folder of a finished cell (runs/STUDY/VARIANT/SEED-IDENTITY), or a folder as
`lit-attn export hub` and `released_weights.py` write it.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lit_attn.cells.rows import csv_lines
from lit_attn.config.cell import Cell
from lit_attn.data.text.batches import Tokens
from lit_attn.data.text.tokenizers import GptNeox
from lit_attn.files import read_text, write_atomic
from lit_attn.hub import load_exported
from lit_attn.hub.generate import load_gpt
from lit_attn.schema.errors import ConfigError, OneLineParser, from_one

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lit_attn.data.text.tokenizers import Encoder
    from lit_attn.models.language import GPT

WINDOW = 2048  # Tokens that a model without learned positions reads at once, as Pythia does.


class Score(NamedTuple):
    """Log-probabilities (n,) of tokens in float64, and True if greedy decoding writes them all."""

    log_p: "Tensor"
    is_greedy: bool


class LanguageModel(NamedTuple):
    """A network in evaluation mode, the encoder of its text, and its number of ids."""

    name: str
    network: "GPT"
    encoder: "Encoder"
    vocabulary: int

    @property
    def device(self) -> "torch.device":
        """Device of the network."""
        return self.network.trunk.tokens.weight.device

    @property
    def max_tokens(self) -> int | None:
        """Largest number of tokens with learned positions; None if no positions are learned."""
        return self.network.trunk.max_tokens

    def log_probabilities(self, ids: list[int], places: list[int]) -> "Tensor":
        """Return log p of every id (len(places), vocabulary) for the tokens at `places`.

        Every place is at least 1: its token follows the tokens before it. Raises ConfigError for
        more tokens than learned positions.
        """
        import torch

        read = ids[: max(places)]
        if self.max_tokens is not None and len(read) > self.max_tokens:
            text = f"are more than the {self.max_tokens} positions that it learned"
            raise ConfigError(f"{self.name}: {len(read)} tokens {text}")
        with torch.no_grad():
            hidden = self.network.trunk(torch.tensor([read], device=self.device))
            before = torch.tensor(places, device=self.device) - 1
            logits = self.network.logits(hidden[:, before])[0, :, : self.vocabulary]
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide).log_softmax(-1)

    def score(self, context: Sequence[int], targets: Sequence[int], window: int) -> Score:
        """Return the score of the tokens `targets` after the tokens `context`.

        The context loses its first tokens if both are longer than `window`. A token without a token
        before it has no score.
        """
        import torch

        # The model does not read the last token.
        ids = [*context, *targets][-window - 1 :]
        first = max(1, len(ids) - len(targets))
        places = list(range(first, len(ids)))
        if not places:
            return Score(torch.empty(0, dtype=torch.float64), is_greedy=True)
        log_p = self.log_probabilities(ids, places).double().cpu()
        scored = torch.tensor(ids[first:])
        is_greedy = torch.equal(log_p.argmax(-1), scored)
        return Score(log_p.gather(1, scored[:, None])[:, 0], is_greedy)


def add_model(parser: OneLineParser) -> None:
    """Add the arguments that name a model: MODEL and --tokenizer."""
    text = "folder of a finished cell, or an exported or converted folder"
    parser.add_argument("model", type=Path, metavar="MODEL", help=text)
    text = "tokenizer.json (default: that of the folder, else that of the configuration)"
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=text)


def add_results(parser: OneLineParser) -> None:
    """Add the arguments of an evaluation: --limit and --out."""
    text = "only the first N documents"
    parser.add_argument("--limit", type=from_one, metavar="N", help=text)
    text = "folder of the results (default: the folder of the model)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def load_model(folder: Path, tokenizer: Path | None = None) -> LanguageModel:
    """Return the language model of a folder; raise ConfigError if it has none.

    A cell with code of its own (`parts`, `import`) is refused, because loading it would execute
    that code.
    """
    is_cell = (folder / "config.yaml").exists()
    path = folder / ("config.yaml" if is_cell else "config.json")
    remedy = "export it and load it with load_exported(FOLDER, trust_code=True)"
    with Cell.open_foreign(path, is_trusted=False, remedy=remedy) as cell:
        data = check_data(cell, folder)
        network = load_gpt(folder, cell) if is_cell else read_exported(folder)
    file = tokenizer or (folder / "tokenizer.json")
    if tokenizer is not None and not tokenizer.is_file():
        raise ConfigError(f"data.tokenizer.file: no file {tokenizer}")
    if file.exists():
        encoder: Encoder = GptNeox(file=file, size=data.tokenizer.vocabulary).encoder(())
    else:
        encoder = data.encoder()
    return LanguageModel(folder.name, network, encoder, data.tokenizer.vocabulary)


def check_data(cell: Cell, folder: Path) -> Tokens:
    """Return the data of a cell; raise ConfigError if they are no text."""
    data = cell.experiment.data
    if not isinstance(data, Tokens):
        raise ConfigError(
            f"{folder}: its task is {cell.experiment.task.kind}. Choose a language model."
        )
    return data


def merge_results(path: Path, rows: Iterable[tuple[str, str, float]]) -> None:
    """Write the rows (task, metric, value) to a CSV file; its other rows remain.

    Raises ConfigError if the file has other columns.
    """
    header = ("task", "metric", "value")
    old = list(csv.reader(io.StringIO(read_text(path)))) if path.exists() else [list(header)]
    if old[:1] != [list(header)] or any(len(row) != len(header) for row in old):
        raise ConfigError(f"{path}: does not have the columns {', '.join(header)}; remove it")
    merged: dict[tuple[str, str], object] = {(row[0], row[1]): row[2] for row in old[1:]}
    merged |= {(task, metric): value for task, metric, value in rows}
    merged_rows = [(task, metric, value) for (task, metric), value in merged.items()]
    write_atomic(path, csv_lines([header, *merged_rows]))


def read_exported(folder: Path) -> "GPT":
    """Return the network of an exported folder; raise ConfigError if it is no GPT."""
    import torch

    from lit_attn.models.language import GPT

    network = load_exported(folder)
    if not isinstance(network, GPT):
        raise ConfigError(
            f"{folder}: its model '{type(network).__name__}' is not supported, only gpt"
        )
    return network.to("cuda" if torch.cuda.is_available() else "cpu")
