"""The record of the colours in a cell's pictures: CELL/pictures/legend.json."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lit_attn.cells.records import Record


class Legend(Record):
    """The legend of a cell's pictures, whose predictions are made after the last step."""

    weights: Literal["trained", "averaged"] = Field(description="weights that predict")
    classes: dict[str, tuple[int, int, int]] = Field(
        description="colour of every class, and of pixels without a label: red, green, blue"
    )
    shown: list[str] = Field(description="entries of `classes` that occur in a picture")

    @model_validator(mode="after")
    def _shows_classes(self) -> Self:
        """Refuse names without a colour, and colours that no file of 8 bits has."""
        for name in self.shown:
            if name not in self.classes:
                raise ValueError(f"shown: '{name}' has no colour")
        for name, colour in self.classes.items():
            if not all(0 <= part <= 255 for part in colour):
                raise ValueError(f"classes: {name}: {list(colour)} is no colour")
        return self
