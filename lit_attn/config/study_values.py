"""Values of the keys of a study: their types, and the checks of what is written."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    WithJsonSchema,
)

from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.source import format_value
from lit_attn.schema.base import must_be
from lit_attn.schema.yaml_text import Mapping, Sequence

MOST_SEEDS = 10_000  # A larger number of seeds is probably meant as one seed.


def _list_criteria(value: Any) -> Any:
    """Return a criterion alone as a tuple of one."""
    return value if isinstance(value, list) else (value,)


def _are_criteria(criteria: tuple[str, ...]) -> bool:
    """Return True if each criterion stands once, and `none` does not stand beside `parameters`."""
    has_contradiction = "parameters" in criteria and "none" in criteria
    is_each_once = len(set(criteria)) == len(criteria)
    return bool(criteria) and is_each_once and not has_contradiction


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, Sequence) and all(_is_mapping(item) for item in value)


def _is_mapping_of_mappings(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_mapping(item) for item in value.values())


def _list_seeds(value: Any) -> Any:
    """Return a number of seeds as the tuple of these seeds, and a list of seeds as it is."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MOST_SEEDS:
            raise ValueError(
                f"{value} is not a number of seeds from 1 to {MOST_SEEDS:,};"
                f" for one seed write [{value}]"
            )
        return tuple(range(value))
    if not isinstance(value, list) or not value:
        raise ValueError("needs a number of seeds, as 5, or a list of seeds, as [0, 50, 100]")
    counts = Counter(str(seed) for seed in value)
    twice = [seed for seed, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"the seed {twice[0]} is written twice; remove one of them")
    return value


def _add_deviation(value: Any) -> Any:
    """Return a number alone as a mean without a deviation."""
    return value if isinstance(value, list) else (value, None)


def _is_one_line(text: str) -> bool:
    return text != "" and text == text.strip() and text.isprintable()


Criterion = Literal["parameters", "flops", "time", "none"]
Criteria = Annotated[
    tuple[Criterion, ...],
    BeforeValidator(_list_criteria, json_schema_input_type=Criterion | tuple[Criterion, ...]),
    must_be(
        _are_criteria,
        "a list of parameters, flops and time, each once; or none in place of parameters",
    ),
]
# These values stay mappings with lines until ablate.axes combines them.
Overrides = Annotated[
    Any, must_be(_is_mapping, "a mapping of keys to values"), WithJsonSchema({"type": "object"})
]
Points = Annotated[
    Any,
    must_be(_is_list_of_mappings, "a list of mappings, as in [{residual: full, zz: with}]"),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Named = Annotated[
    Any,
    must_be(
        _is_mapping_of_mappings, "a mapping of names to mappings, as in {xsa: {attention: xsa}}"
    ),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "object"}}),
]
Word = str | int | float | bool
Name = Annotated[str, BeforeValidator(format_value, json_schema_input_type=Word)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
SeedChoice = int | tuple[int, ...]
"""Value of `--seeds`: a number of the study's seeds, or the seeds themselves."""
Seeds = Annotated[
    tuple[Seed, ...],
    BeforeValidator(_list_seeds, json_schema_input_type=PositiveInt | tuple[Seed, ...]),
]
Published = Annotated[
    tuple[float, float | None],
    BeforeValidator(_add_deviation, json_schema_input_type=float | tuple[float, float | None]),
]
Label = Annotated[
    str,
    BeforeValidator(format_value, json_schema_input_type=Word),
    must_be(_is_one_line, "a text of one line"),
]
