"""Perplexity of a language model on texts.

    python experiments/released/text_perplexity.py MODEL FILES

DCMHA's Table 4 (arXiv:2405.08553) has perplexities on the validation split of the Pile and on a
random subset of the Flan Collection, which has not been published. FILES are local files:

    NAME.jsonl  one object in each line: {"text": ...} is a document, as in the Pile;
                {"inputs": ..., "targets": ...} is an example, as in Flan
    NAME.txt    one document

Documents are joined, each with the end of a document behind it, and cut into windows of --window
tokens. Every token is predicted from the tokens before it in its window, and a window starts with
the last token of the one before. Only the targets of an example are scored, after its inputs and a
space; long inputs lose their first tokens. Perplexity is exp of the mean negative log-likelihood of
a token, so models with different tokenizers cannot be compared.

Three rows are written to harness-0.csv in the folder of the model, beside those of
`evaluation_harness.py`: (--name, perplexity, value), (--name, tokens, value), and
(--name, perplexity_stderr, value), which is the standard error over the windows. The page that
`python -m lit_attn.report --paper dcmha` writes shows `--name pile` and `--name flan` of the models
in runs/released-weights.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from language_models import (
    WINDOW,
    LanguageModel,
    add_model,
    add_results,
    load_model,
    merge_results,
)

from lit_attn.files import read_text
from lit_attn.schema.errors import ConfigError, OneLineParser, command, from_one


class Example(NamedTuple):
    """A text whose `targets` are scored after its `inputs`."""

    inputs: str
    targets: str


class Loss(NamedTuple):
    """Sum of the negative log-likelihoods of tokens, in nats, and their number."""

    total: float
    tokens: int


@command
def main(arguments: list[str] | None = None) -> int:
    """Measure a model and print its perplexity; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(
        prog="python experiments/released/text_perplexity.py", description=__doc__
    )
    add_model(parser)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .txt")
    parser.add_argument("--name", default="pile", help="name of the text (default pile)")
    text = "tokens that the model reads at once (default 2048, or its learned positions)"
    parser.add_argument("--window", type=from_one, metavar="N", help=text)
    add_results(parser)
    evaluate(parser.parse_args(arguments))
    return 0


def evaluate(options: Namespace) -> None:
    """Write and print the perplexity of a model."""
    documents, examples = read_files(options.files, options.limit)
    model = load_model(options.model, options.tokenizer)
    window = options.window or model.max_tokens or WINDOW
    if model.max_tokens is not None and window > model.max_tokens:
        raise ConfigError(f"--window: the model has learned {model.max_tokens} positions")
    losses = list(score_documents(model, documents, window))
    losses += [score_example(model, example, window) for example in examples]
    count = sum(loss.tokens for loss in losses)
    if not count:
        raise ConfigError(f"{options.files[0]}: has no token to predict")
    perplexity = math.exp(math.fsum(loss.total for loss in losses) / count)
    rows = [(options.name, "perplexity", perplexity), (options.name, "tokens", count)]
    if len(losses) > 1:
        rows.append((options.name, "perplexity_stderr", perplexity * measure_error(losses)))
    merge_results((options.out or options.model) / "harness-0.csv", rows)
    print(f"{model.name}: perplexity {perplexity:.4g} on {options.name}, {count:,} tokens")


def measure_error(losses: list[Loss]) -> float:
    """Return the standard error of the loss of a token, with the windows as independent samples.

    The loss is a ratio of two sums, whose error is that of its linearisation. It is also the
    relative error of the perplexity.
    """
    tokens = sum(loss.tokens for loss in losses)
    mean = math.fsum(loss.total for loss in losses) / tokens
    squares = math.fsum((loss.total - mean * loss.tokens) ** 2 for loss in losses)
    return math.sqrt(squares * len(losses) / (len(losses) - 1)) / tokens


def read_files(paths: list[Path], limit: int | None) -> tuple[list[str], list[Example]]:
    """Return the first `limit` documents and examples. Raises ConfigError for a malformed file."""
    documents: list[str] = []
    examples: list[Example] = []
    for path in paths:
        for record in read_records(path):
            if len(documents) + len(examples) == limit:
                return documents, examples
            if isinstance(record, Example):
                examples.append(record)
            else:
                documents.append(record)
    return documents, examples


def read_records(path: Path) -> Iterator[str | Example]:
    """Yield the documents and examples of a file. Raises ConfigError for a malformed line."""
    if path.suffix != ".jsonl":
        yield read_text(path)
        return
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        texts = record if isinstance(record, dict) else {}
        texts = {key: text for key, text in texts.items() if isinstance(text, str)}
        if "text" in texts:
            yield texts["text"]
        elif {"inputs", "targets"} <= texts.keys():
            yield Example(texts["inputs"], texts["targets"])
        else:
            raise ConfigError(f"{path}:{number}: needs `text`, or `inputs` and `targets`")


def score_documents(model: LanguageModel, documents: Iterable[str], window: int) -> Iterator[Loss]:
    """Yield the loss of every window of the joined documents."""
    texts = list(documents)
    if not texts:
        return
    ids: list[int] = []
    for part in model.encoder.encode(texts):
        ids += [int(token) for token in part]
    for start in range(0, len(ids) - 1, window):
        # A window starts with the last token of the one before.
        targets = ids[start + 1 : start + window + 1]
        yield measure_loss(model, [ids[start]], targets, window)


def score_example(model: LanguageModel, example: Example, window: int) -> Loss:
    """Return the loss of the targets of an example."""
    context = model.encoder.prompt(example.inputs)
    if not context and model.encoder.end is not None:
        context = [model.encoder.end]
    targets = model.encoder.prompt(f" {example.targets}")
    return measure_loss(model, context, targets, window)


def measure_loss(model: LanguageModel, context: list[int], targets: list[int], window: int) -> Loss:
    """Return the loss of the tokens `targets` after the tokens `context`."""
    log_p, _ = model.score(context, targets, window)
    return Loss(-log_p.sum().item(), len(log_p))


if __name__ == "__main__":
    sys.exit(main())
