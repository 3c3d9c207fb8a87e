"""Base of the parts of an answer, and its JSON."""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from lit_attn.report.numbers import round_number


class Entry(BaseModel):
    """Base of all parts of an answer; every key is always present."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)

    @classmethod
    def from_record(cls, record: object, **others: Any) -> Self:
        """Return the entry with all values of `record` that have the same name, and `others`."""
        names = cls.model_fields.keys() - others.keys()
        values = {name: getattr(record, name) for name in names}
        return cls(**values, **others)


def write_answer(answer: Entry) -> str:
    """Return an answer as JSON, with numbers of at most 12 significant digits."""
    return json.dumps(_round(answer.model_dump()), indent=2, ensure_ascii=False)


def _round(value: Any) -> Any:
    """Return `value` with rounded numbers, which are the same on every processor."""
    if isinstance(value, dict):
        return {key: _round(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_round(entry) for entry in value]
    return round_number(value) if isinstance(value, float) else value
