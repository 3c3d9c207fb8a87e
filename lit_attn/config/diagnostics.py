"""What is looked at while a cell trains (docs/diagnostics.md)."""

from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, model_validator

from lit_attn.schema.base import Config
from lit_attn.schema.errors import suggest

Kind = Literal["residual", "rank", "maps", "heads", "mixture"]

# Those that look at samples, so many of them; the others look at weights alone.
OF_SAMPLES = {"residual", "rank", "maps"}
SAMPLES = 32


class Diagnostics(Config):
    """What the papers plot of attention layers, recorded at evaluations.

    *residual*: norms and angles of MH and Delta (BeliefFormer Fig. 3); *rank*: of the attention
    matrices (MGK Fig. 2, 7); *maps*: the attention matrices of one sample (MGK Fig. 6); *heads*:
    diversity of the QK and OV circuits (DCMHA Fig. 5); *mixture*: the learned pi (MGK Table 8). In
    YAML the kinds alone may stand for the mapping. A layer that has no such thing, linear keys no
    attention matrix for instance, records nothing of it: a study crosses mechanisms.
    """

    kinds: tuple[Kind, ...] = Field(min_length=1, description="quantities to record")
    samples: PositiveInt = Field(SAMPLES, description="of the first evaluation batch")
    every: PositiveInt = Field(1, description="evaluations; the last one counts always")

    @model_validator(mode="before")
    @classmethod
    def _kinds_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [value]
        given = {"kinds": value} if isinstance(value, list | tuple) else value
        kinds = given.get("kinds") if isinstance(given, dict) else None
        for kind in kinds if isinstance(kinds, list | tuple) else ():
            if kind not in get_args(Kind):
                raise ValueError(f"'{kind}' is no diagnostic{suggest(str(kind), get_args(Kind))}")
        return given

    @model_validator(mode="after")
    def _nothing_idle(self) -> "Diagnostics":
        if len(set(self.kinds)) < len(self.kinds):
            raise ValueError("kinds: one is written twice")
        if not OF_SAMPLES & set(self.kinds) and self.samples != SAMPLES:
            raise ValueError(f"samples: {' and '.join(self.kinds)} look at weights, at no sample")
        return self
