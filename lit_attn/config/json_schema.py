"""JSON schemas of the YAML files, for completion and checks in editors (docs/commands.md).

They are written from the classes that read the files, so they have the same keys, values and
descriptions. What depends on several keys is found by `lit-attn run --dry-run` only.
"""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from lit_attn.config.experiment import Experiment
from lit_attn.config.overrides import SHORTHANDS, list_fields
from lit_attn.config.study import StudyConfig
from lit_attn.schema.base import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OVERRIDE = "Override"
"""Name of the definition of a variant's changes to an experiment."""


class QuietSchema(GenerateJsonSchema):
    """Generator that leaves out defaults which JSON cannot contain, such as an empty mapping."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}  # noqa: RUF012


def make_experiment_schema() -> dict[str, Any]:
    """Return the schema of a file of `experiments/`."""
    schema = _make_schema(Experiment)
    return {"$schema": DIALECT, "title": "Experiment", **schema}


def make_study_schema() -> dict[str, Any]:
    """Return the schema of a file of studies, such as ablations.yaml."""
    study = _make_schema(StudyConfig)
    definitions = study.pop("$defs", {})
    definitions["Study"] = study
    definitions[OVERRIDE] = _make_override_schema()
    override = {"$ref": f"#/$defs/{OVERRIDE}"}
    properties = study["properties"]
    properties["set"] |= override
    properties["cells"] |= {"additionalProperties": override}
    # `design` decides the seeds in place of the key `seeds`.
    study["required"] = [key for key in study["required"] if key != "seeds"]
    return {
        "$schema": DIALECT,
        "title": "Studies",
        "type": "object",
        "properties": {
            "studies": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Study"}},
            "files": {"type": "object", "description": "further files, with their studies"},
        },
        "required": ["studies"],
        "additionalProperties": False,
        "$defs": definitions,
    }


SCHEMAS = {"experiment": make_experiment_schema, "study": make_study_schema}
"""Functions that return a schema, by the name of the file that it describes."""


def _make_schema(config: type[Config]) -> dict[str, Any]:
    return config.model_json_schema(by_alias=True, schema_generator=QuietSchema)


def _make_override_schema() -> dict[str, Any]:
    """Return the schema of a mapping of keys, with dots or short, to values of an experiment.

    The values have no schema: a mapping without a kind changes the part that it meets.
    """
    descriptions: dict[str, str] = {}
    for keys, field in list_fields(Experiment):
        descriptions.setdefault(".".join(keys), field.description or "")
    for shorthand, keys in SHORTHANDS.items():
        descriptions[shorthand] = descriptions[".".join(keys)]
    descriptions["match"] = "`parameters`, or `none` for this variant"
    return {
        "type": "object",
        "properties": {key: {"description": text} for key, text in descriptions.items()},
    }
