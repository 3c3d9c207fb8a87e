"""Answers of commands with --json, validated against the schema that the package ships."""

import json
from typing import Any

import jsonschema

from lit_attn.report.answers.schemas import SCHEMAS


def read_answer(text: str) -> dict[str, Any]:
    """Return the answer in `text`. Raises ValidationError unless it fits the schema of its name."""
    answer: dict[str, Any] = json.loads(text)
    schema = json.loads((SCHEMAS / f"{answer['command']}.json").read_text("utf-8"))
    jsonschema.validate(answer, schema)
    return answer
