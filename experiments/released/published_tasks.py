"""Score a language model on DCMHA's tasks.

    python experiments/released/published_tasks.py MODEL FILE

FILE is the published synthetic_dataset.jsonl (github.com/Caiyun-AI/DCFormer, folder data): 74 tasks
with 12 texts each. A text has eight examples, and the answers in brackets are scored. The model
reads a text without the brackets, so an answer follows the correct answers of all earlier examples;
`shots` is their number.

Neither the paper (arXiv:2405.08553, section 4.3 and appendix F) nor its code gives formulas. Here
an answer is correct if each of its tokens has the largest logit, and perplexity is exp of the mean
negative log-likelihood of the tokens of all answers. Three files are written to --out:

    tasks.csv    task, shots and SCORES: one row for each task and number of shots
    shots.csv    shots and SCORES: all answers by number of shots (Figure 6)
    overall.csv  SCORES: all answers (Table 5)

SCORES are the columns accuracy, perplexity, n and perplexity_stderr. The last one is the standard
error of the perplexity with the answers as independent samples; it is empty for one answer.

`python -m lit_attn.report --paper dcmha` shows them for the models in runs/released-weights.
"""

import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from language_models import LanguageModel, add_model, load_model

from lit_attn.cells.rows import csv_lines
from lit_attn.files import read_text, write_atomic
from lit_attn.schema.errors import ConfigError, OneLineParser, command, from_one

if TYPE_CHECKING:
    from lit_attn.data.text.tokenizers import Encoder

ANSWER = re.compile(r" \[ ([^\[\]\n]+) \]")

# Table 5: perplexity and accuracy.
PUBLISHED = {"Pythia-6.9B": ("10.05", "31.9%"), "DCPythia-6.9B": ("7.36", "39.0%")}


class Piece(NamedTuple):
    """Part of a text; `shots` is the number of earlier examples, and None outside answers."""

    text: str
    shots: int | None


class Answer(NamedTuple):
    """Score of an answer: sum of the negative log-likelihoods of its tokens, in nats."""

    task: str
    shots: int
    is_correct: bool
    nll: float
    tokens: int


class Scores(NamedTuple):
    """Accuracy, perplexity and number of several answers, and the perplexity's standard error."""

    accuracy: float
    perplexity: float
    n: int
    perplexity_stderr: float | None = None


@command
def main(arguments: list[str] | None = None) -> int:
    """Score a model and print the summary; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(
        prog="python experiments/released/published_tasks.py", description=__doc__
    )
    add_model(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="synthetic_dataset.jsonl")
    text = "folder of the tables (default: published-tasks in the folder of the model)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    text = "score only the first N texts of each task"
    parser.add_argument("--texts", type=from_one, metavar="N", help=text)
    evaluate(parser.parse_args(arguments))
    return 0


def evaluate(options: Namespace) -> None:
    """Write the tables of a model and print its summary beside the published numbers."""
    texts = read_texts(options.file, options.texts)
    model = load_model(options.model, options.tokenizer)
    answers = []
    for task, task_texts in texts.items():
        for text in task_texts:
            answers += score_text(model, task, text)
    out = options.out or options.model / "published-tasks"
    by_task = group(answers, lambda answer: (answer.task, str(answer.shots)))
    write_scores(out / "tasks.csv", ["task", "shots"], by_task)
    by_shots = group(answers, lambda answer: (str(answer.shots),))
    by_shots = dict(sorted(by_shots.items(), key=lambda item: int(item[0][0])))
    overall = summarise(answers)
    write_scores(out / "shots.csv", ["shots"], by_shots)
    write_scores(out / "overall.csv", [], {(): overall})
    print(describe(model.name, overall, by_shots))


def read_texts(path: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Return the first `limit` texts of each task, by task; ConfigError for a malformed file."""
    texts: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: not JSON: {error}") from error
        if not isinstance(record, dict) or not all(
            isinstance(record.get(key), str) for key in ("task_id", "texts")
        ):
            raise ConfigError(f"{place}: needs the texts `task_id` and `texts`")
        if not ANSWER.search(record["texts"]):
            raise ConfigError(f"{place}: has no answer in brackets, such as ` [ fruit ]`")
        texts.setdefault(record["task_id"], []).append(record["texts"])
    if not texts:
        raise ConfigError(f"{path}: is empty")
    return {task: task_texts[:limit] for task, task_texts in texts.items()}


def split_text(text: str) -> list[Piece]:
    """Split a text into its answers, each with the space before it, and the parts between them."""
    pieces = []
    end = 0
    first = len(text) - len(text.lstrip("\n"))
    for match in ANSWER.finditer(text):
        pieces.append(Piece(text[end : match.start()], None))
        shots = text.count("\n", first, match.start())
        pieces.append(Piece(f" {match[1]}", shots))
        end = match.end()
    return pieces


def encode(encoder: "Encoder", pieces: list[Piece]) -> tuple[list[int], list[range]]:
    """Return the ids of a text, and the places of the ids of each answer.

    Raises ConfigError if the encoder joins an answer and its neighbours in one token.
    """
    ids: list[int] = []
    places = []
    for piece in pieces:
        start = len(ids)
        ids += encoder.prompt(piece.text)
        if piece.shots is not None:
            places.append(range(start, len(ids)))
    if ids != encoder.prompt("".join(piece.text for piece in pieces)):
        raise ConfigError("the tokenizer joins answers and their neighbours in one token")
    return ids, places


def score_text(model: LanguageModel, task: str, text: str) -> list[Answer]:
    """Return the scores of the answers of a text."""
    pieces = split_text(text)
    ids, places = encode(model.encoder, pieces)
    flat = [place for answer in places for place in answer]
    log_p = model.log_probabilities(ids, flat).double().cpu()
    targets = [ids[place] for place in flat]
    losses = [-row[target].item() for row, target in zip(log_p, targets, strict=True)]
    hits = [int(row.argmax()) == target for row, target in zip(log_p, targets, strict=True)]
    scores = []
    start = 0
    shots = [piece.shots for piece in pieces if piece.shots is not None]
    for number, answer in zip(shots, places, strict=True):
        part = slice(start, start + len(answer))
        start = part.stop
        scores.append(Answer(task, number, all(hits[part]), sum(losses[part]), len(answer)))
    return scores


def group(
    answers: Iterable[Answer], key: Callable[[Answer], tuple[str, ...]]
) -> dict[tuple[str, ...], Scores]:
    """Return the scores of the answers with equal keys, in the order of their first answers."""
    groups: dict[tuple[str, ...], list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return {name: summarise(members) for name, members in groups.items()}


def summarise(answers: list[Answer]) -> Scores:
    """Return the scores of answers."""
    count = len(answers)
    tokens = sum(answer.tokens for answer in answers)
    nll = math.fsum(answer.nll for answer in answers) / tokens
    correct = sum(answer.is_correct for answer in answers)
    perplexity = math.exp(nll)
    if count < 2:
        return Scores(correct / count, perplexity, count)
    # The mean of a token is a ratio of two sums, whose error is that of its linearisation.
    squares = math.fsum((answer.nll - nll * answer.tokens) ** 2 for answer in answers)
    error = math.sqrt(squares * count / (count - 1)) / tokens
    return Scores(correct / count, perplexity, count, perplexity * error)


def write_scores(path: Path, keys: list[str], scores: dict[tuple[str, ...], Scores]) -> None:
    """Write a CSV file with the columns `keys` and the fields of the scores."""
    rows = []
    for name, score in scores.items():
        error = score.perplexity_stderr
        texts = (f"{score.accuracy:.6g}", f"{score.perplexity:.6g}", score.n)
        rows.append((*name, *texts, "" if error is None else f"{error:.6g}"))
    write_atomic(path, csv_lines([(*keys, *Scores._fields), *rows]))


def describe(name: str, overall: Scores, by_shots: dict[tuple[str, ...], Scores]) -> str:
    """Return two tables in Markdown: Table 5 with this model, then the values of Figure 6."""
    lines = ["| model | PPL | Acc |", "|---|---|---|"]
    lines += [f"| {model} (published) | {' | '.join(row)} |" for model, row in PUBLISHED.items()]
    lines.append(f"| {name} | {overall.perplexity:.2f} | {overall.accuracy:.1%} |")
    lines += ["", "| shots | PPL | Acc | n |", "|---|---|---|---|"]
    lines += [
        f"| {shots} | {part.perplexity:.2f} | {part.accuracy:.1%} | {part.n} |"
        for (shots,), part in by_shots.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
