"""Answers of commands with --json, validated against their schemas."""

import json
from typing import Any

import jsonschema

from lit_attn.answer_schemas import make_schema


def read_answer(text: str) -> dict[str, Any]:
    """Return the answer in `text`. Raises ValidationError unless it fits the schema of its name."""
    answer: dict[str, Any] = json.loads(text)
    jsonschema.validate(answer, make_schema(answer["command"]))
    return answer
