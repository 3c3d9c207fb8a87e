"""States of runs in the words of the programs that wrote them."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from lit_attn.judging.run_table import RunTable
from lit_attn.schema.errors import ConfigError, plural

State = Literal["done", "failed", "open"]
STATES: tuple[State, ...] = get_args(State)

MOST_NAMED = 6
"""Most unknown words that an error names."""

STATE_COLUMNS = ("state", "status")
"""Names of a column with states, in small letters."""

WORDS: dict[str, State] = {
    # W&B, MLflow, SLURM, Optuna, and a ledger of autoresearch, whose discarded runs have ended like
    # the others. Words with two meanings, such as "stopped" or "pruned", are not here.
    "finished": "done",
    "done": "done",
    "complete": "done",
    "completed": "done",
    "success": "done",
    "succeeded": "done",
    "keep": "done",
    "discard": "done",
    "fail": "failed",
    "failed": "failed",
    "failure": "failed",
    "aborted": "failed",
    "cancelled": "failed",
    "canceled": "failed",
    "timeout": "failed",
    "out_of_memory": "failed",
    "node_fail": "failed",
    "crashed": "failed",
    "crash": "failed",
    "killed": "failed",
    "error": "failed",
    "diverged": "failed",
    "running": "open",
    "pending": "open",
    "waiting": "open",
    "queued": "open",
    "scheduled": "open",
    "preempted": "open",
    "interrupted": "open",
    "missing": "open",
    "preempting": "open",
}
"""State of a run by the word in small letters."""


def parse_meaning(text: str) -> tuple[str, State]:
    """Return the word and the state of `WORD=done`, `WORD=failed` or `WORD=open`."""
    word, _, meaning = text.rpartition("=")
    for state in STATES:
        if meaning.strip() == state and "=" in text:
            return word.strip().lower(), state
    raise ConfigError(f"--state: '{text}' is not WORD=done, WORD=failed or WORD=open")


def read_states(table: RunTable, notes: list[str], meanings: Sequence[str] = ()) -> list[State]:
    """Return the state of every row: "done" without a column of states.

    `meanings` are further words with their states (`parse_meaning`). `notes` gets a sentence for
    each state that is not "done". Raises ConfigError for a word that is not known: its runs could
    have failed.
    """
    known = WORDS | dict(parse_meaning(text) for text in meanings)
    columns = [column for column in table.columns if column.strip().lower() in STATE_COLUMNS]
    if not columns:
        return ["done" for _ in table.rows]
    # Another column can have this name too, such as the states of a country.
    words = {column: _read_words(table, column) for column in columns}
    recognised = [c for c in columns if any(word.lower() in known for word in words[c])]
    chosen = (recognised or columns)[0]
    return _translate(f"{table.source}: {chosen}", words[chosen], known, notes)


def _read_words(table: RunTable, column: str) -> list[str]:
    words = []
    for row in table.rows:
        written = row.get(column)
        words.append("" if written is None else str(written).strip())
    return words


def _translate(
    where: str, words: list[str], known: Mapping[str, State], notes: list[str]
) -> list[State]:
    """Return the states that words mean. Raises ConfigError for words that are not known."""
    counts = Counter(words)
    unknown = [word for word in counts if word.lower() not in known]
    if unknown:
        shown = [f"'{word}' in {plural(counts[word], 'run')}" for word in unknown[:MOST_NAMED]]
        rest = ", ..." if len(unknown) > MOST_NAMED else ""
        example = shlex.quote(f"{unknown[0]}=failed")
        raise ConfigError(
            f"{where}: no known state of a run: {', '.join(shown)}{rest}; say what each means with"
            f" --state {example} (or done, or open), or rename a column without states of runs"
        )
    for word, count in counts.items():
        state = known[word.lower()]
        runs = plural(count, "run")
        if state == "failed":
            notes.append(f"Failed: {runs} with the state '{word}', whatever the value.")
        if state == "open":
            notes.append(f"Not ended: {runs} with the state '{word}'.")
    return [known[word.lower()] for word in words]
