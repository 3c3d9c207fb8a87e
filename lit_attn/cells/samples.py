"""Record of generated texts: one of each variant of a study of language models.

`lit-attn generate` writes it beside the plan in the folder of the study, as `samples.json`, and the
page of the study shows it.
"""

from pydantic import FiniteFloat

from lit_attn.cells.records import Integer, Record

SAMPLES_FILE = "samples.json"


class Sample(Record):
    """Text of a cell: the prompt as its model reads it, and the continuation."""

    variant: str
    seed: Integer
    identity: str
    text: str


class Samples(Record):
    """Texts of one cell of each variant, drawn in the same way."""

    temperature: FiniteFloat
    top_k: Integer | None
    seed: Integer
    samples: list[Sample]
