"""Small mappings for the measurements of many cells."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any


class Row(Mapping[str, Any]):
    """Mapping as small as a tuple: rows with the same keys share them."""

    __slots__ = ("_places", "_values")

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._places = _number(tuple(content))
        self._values = tuple(content.values())

    def __getitem__(self, key: str) -> Any:
        return self._values[self._places[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._values)


@lru_cache(maxsize=1000)
def _number(keys: tuple[str, ...]) -> dict[str, int]:
    """Return the place of each key; rows with the same keys get the same dictionary."""
    return {key: place for place, key in enumerate(keys)}
