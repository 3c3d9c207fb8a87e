"""States of runs in the words of the programs that wrote them."""

from typing import Literal

from lit_attn.report.foreign.run_table import RunTable
from lit_attn.schema.errors import plural

State = Literal["done", "failed", "open"]

COLUMNS = ("state", "status")
"""Names of a column with states, in small letters."""

WORDS: dict[str, State] = {
    # W&B, MLflow, and a ledger of autoresearch, whose discarded runs have ended like the others.
    "finished": "done",
    "done": "done",
    "completed": "done",
    "success": "done",
    "keep": "done",
    "discard": "done",
    "failed": "failed",
    "crashed": "failed",
    "crash": "failed",
    "killed": "failed",
    "error": "failed",
    "diverged": "failed",
    "running": "open",
    "pending": "open",
    "queued": "open",
    "scheduled": "open",
    "preempted": "open",
    "preempting": "open",
}
"""State of a run by the word in small letters."""


def read_states(table: RunTable, notes: list[str]) -> list[State]:
    """Return the state of every row: "done" without a column of states.

    A column with any other word is not used. `notes` gets a sentence for each that is not "done",
    and for a column that is not used.
    """
    for column in table.columns:
        if column.strip().lower() not in COLUMNS:
            continue
        words = [str(row.get(column, "")).strip() for row in table.rows]
        unknown = [word for word in words if word.lower() not in WORDS]
        if unknown:
            notes.append(
                f"The column '{column}' is not used as the state of runs: '{unknown[0]}' is not one"
                f" of {', '.join(WORDS)}."
            )
            continue
        _count_words(words, notes)
        return [WORDS[word.lower()] for word in words]
    return ["done" for _ in table.rows]


def _count_words(words: list[str], notes: list[str]) -> None:
    """Add a sentence for each word of runs that have failed or not ended."""
    for word in dict.fromkeys(words):
        state = WORDS[word.lower()]
        count = words.count(word)
        runs = plural(count, "run")
        if state == "failed":
            notes.append(f"Failed: {runs} with the state '{word}', whatever the value.")
        if state == "open":
            notes.append(f"Not ended: {runs} with the state '{word}'.")
