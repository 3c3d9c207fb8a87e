"""Images with a label for every pixel: ADE20K, and images of the user."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from lit_attn.schema.base import consistency_check, outside_identity
from lit_attn.segmentation.data import Colour, Scenery
from lit_attn.segmentation.label_masks import IGNORED


class Ade20k(Scenery, kind="ade20k"):
    """ADE20K's 150 classes (Zhou et al. 2017); `root` is the folder ADEChallengeData2016."""

    num_classes: ClassVar = 150
    root: Path = outside_identity(Path("data/ADEChallengeData2016"), "folder of the images")


class MasksConfig(Scenery, kind="masks"):
    """Images of the user with classes of the user, in ADE20K's layout below `root`.

    A label file, best a PNG, has one number for each pixel (from 0 in the order of `classes`; 255
    and `void` are no class). With `colours` its pixels have these colours, directly or through its
    palette.
    """

    first_label: ClassVar = 0
    void_hint: ClassVar = " (data.void: a further number for no class)"
    name: str = Field(description="name of the data set in identities and tables")
    root: Path = outside_identity(..., "folder of the images and annotations")
    classes: tuple[str, ...] = Field(min_length=2, max_length=255, description="names of classes")
    colours: tuple[Colour, ...] = Field(
        (), description="colour (red, green, blue) of each class in label files; empty: numbers"
    )
    void: int | Colour | None = Field(
        None,
        description="number of the pixels without a class, besides 255; colour with `colours`",
    )

    @consistency_check
    def _class_names_differ(self) -> None:
        """Refuse repeated classes."""
        for name in self.classes:
            if self.classes.count(name) > 1:
                raise ValueError(f"classes: '{name}' stands there twice")

    @consistency_check
    def _each_class_has_a_colour(self) -> None:
        """Refuse colours that do not tell all classes and `void` apart."""
        if not self.colours:
            if isinstance(self.void, tuple):
                raise ValueError(
                    f"void: {list(self.void)} is a colour, and label files have numbers without "
                    "`colours`; write the number of the pixels without a class"
                )
            return
        if isinstance(self.void, int):
            raise ValueError(
                f"void: {self.void} is a number, and label files have `colours`; write the colour "
                "of the pixels without a class: [red, green, blue]"
            )
        different = {*self.colours} - {self.void}
        if len(self.colours) != self.num_classes or len(different) != self.num_classes:
            raise ValueError(
                f"colours: {len(self.colours)} for {len(self.classes)} classes; each class and "
                "`void` need a colour of their own"
            )

    @consistency_check
    def _void_is_no_class(self) -> None:
        """Refuse the number of a class as `void`."""
        if isinstance(self.void, int) and 0 <= self.void < self.num_classes:
            raise ValueError(
                f"void: {self.void} is the number of the class '{self.classes[self.void]}'; the "
                f"numbers 0 to {self.num_classes - 1} are those of `classes`"
            )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def label_colours(self) -> dict[Colour, int]:
        labels = {colour: number for number, colour in enumerate(self.colours)}
        if isinstance(self.void, tuple):
            labels[self.void] = IGNORED
        return labels

    @property
    def void_numbers(self) -> tuple[int, ...]:
        return (self.void, IGNORED) if isinstance(self.void, int) else (IGNORED,)
