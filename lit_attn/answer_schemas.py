"""JSON schemas of all answers, which `lit-attn schema` prints.

`FORMAT` changes when a key changes its meaning or goes away; a new key leaves it as it is. The
answer to a mistake is written by `lit_attn.schema.error_answer`.
"""

from typing import Any, Literal

from lit_attn.judging.answers import JudgeAnswer, LawsAnswer
from lit_attn.report.answers.entry import Entry
from lit_attn.report.answers.runs import DryRunAnswer, ReportAnswer, StatusAnswer
from lit_attn.schema.error_answer import FORMAT, Kind


class Mistake(Entry):
    """Mistake of the user, and its place.

    `kind` is "usage" (the command line), "file" (it cannot be read or written), or "config" (the
    content of a file). `file`, `line` and `key` are null where the message names none.
    """

    kind: Kind
    file: str | None
    line: int | None
    key: str | None
    message: str


class ErrorAnswer(Entry):
    """Answer of any command with --json after a mistake; the exit code is 2."""

    format: int = FORMAT
    command: Literal["error"] = "error"
    error: Mistake


ANSWERS: dict[str, type[Entry]] = {
    "dry-run": DryRunAnswer,
    "status": StatusAnswer,
    "report": ReportAnswer,
    "judge": JudgeAnswer,
    "laws": LawsAnswer,
    "error": ErrorAnswer,
}
"""Model of each answer by the name of its schema."""


def make_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of an answer; every key is required."""
    return ANSWERS[name].model_json_schema(mode="serialization")
