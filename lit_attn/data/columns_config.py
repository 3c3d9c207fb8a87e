"""Tables of numbers and categories: a class or numbers to predict for each row."""

from typing import ClassVar

from pydantic import Field, PositiveInt

from lit_attn.data.base import Data, method
from lit_attn.data.tables_config import Table
from lit_attn.schema.base import consistency_check
from lit_attn.signatures import ColumnLabels, ColumnTargets


class Columns(Table, Data):
    """Rows of a table, whose columns are numbers or categories.

    Numbers are standardised by the mean and the deviation of the training rows. The values of a
    category are numbered in alphabetical order. A row with an empty cell is left out.
    """

    name: str = Field(description="name of the data set in identities and tables")
    numbers: tuple[str, ...] = Field((), description="columns of numbers")
    categories: dict[str, PositiveInt] = Field(
        {}, description="columns of categories, with the number of values that train has at most"
    )
    validation: int = Field(
        0, ge=0, description="rows held out of train, always the same ones, if there is no `val`"
    )

    build: ClassVar = method("lit_attn.data.columns:ColumnData")

    @property
    def category_columns(self) -> list[str]:
        """Columns of categories in the order of their tokens.

        Identities do not have the order in which a mapping is written, so it must change nothing.
        """
        return sorted(self.categories)

    @property
    def category_sizes(self) -> tuple[int, ...]:
        """Number of values of each column of `category_columns`."""
        return tuple(self.categories[column] for column in self.category_columns)

    @consistency_check
    def _has_distinct_columns(self) -> None:
        """Refuse a table without columns to read, and a column that is named twice."""
        if not self.numbers and not self.categories:
            raise ValueError("numbers: needs a column in `numbers` or `categories`")
        keys: dict[str, str] = {}
        for key, column in self.columns.items():
            if column in keys.values():
                first = next(name for name, other in keys.items() if other == column)
                raise ValueError(f"{key}: column '{column}' is also named by `{first}`; remove one")
            keys[key] = column


class ColumnClasses(Columns, kind="column-labels"):
    """Rows of numbers and categories with one class each: numbers from 0, or names."""

    column_keys: ClassVar = ("numbers", "categories", "label")
    label: str = Field("label", description="column of the classes")
    classes: PositiveInt = Field(2, description="number of classes")

    def signature(self) -> ColumnLabels:
        return ColumnLabels(len(self.numbers), self.category_sizes, self.classes)


class ColumnNumbers(Columns, kind="column-targets"):
    """Rows of numbers and categories, and numbers to predict, for the task `regression`."""

    column_keys: ClassVar = ("numbers", "categories", "targets")
    targets: tuple[str, ...] = Field(min_length=1, description="columns of the numbers to predict")

    def signature(self) -> ColumnTargets:
        return ColumnTargets(len(self.numbers), self.category_sizes, len(self.targets))
