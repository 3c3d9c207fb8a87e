"""Bytes of all live tensors, by part of a training, and their peak.

`LiveBytes` is a mode of PyTorch's dispatcher: it sees the result of every operation and counts the
bytes of its memory until the last tensor that uses it is gone. It works on real tensors, and on
fake tensors (`FakeTensorMode`), which have shapes and no values. PyTorch's own `MemTracker` does
the same, but is private (`torch.distributed._tools`) and has other parts.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_attn.private_names.of_torch import TorchDispatchMode, read_number, storage_id

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of live tensors that were created while this mode was active.

    `part` names what the next tensors belong to, and can be changed at any time. `live` has the
    bytes of each part now, and `peaks`, for each phase that `start_phase` began, those at the
    moment of the phase at which their sum was largest.

    Fake tensors have no values. So every place of a mask counts as selected in `x[mask]`, which is
    the largest size, and a number that the program reads is 1. A truth value that it reads remains
    an error, because the program would go another way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        self.live: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._phase = ""
        self._total = 0
        self._largest_total = 0
        self._parts: dict[int, str] = {}
        """Part of each live storage, by the address of the storage object."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the memory of its result."""
        if function is aten.nonzero.default:
            result = _list_all_places(*arguments)
        elif function is aten.index.Tensor:
            values, indices = arguments
            result = function(values, _select_all(indices))
        elif function is read_number.default and arguments[0].dtype != torch.bool:
            return 1
        else:
            result = function(*arguments, **(options or {}))
        self._count_all(result)
        return result

    def start_phase(self, name: str) -> None:
        """Begin a phase with a peak of its own."""
        self._phase = name
        self.peaks[name] = Counter(self.live)
        self._largest_total = self._total

    def move(self, tensor: Tensor, part: str) -> None:
        """Count the memory of `tensor` as a part of `part` from now on."""
        storage = tensor.untyped_storage()
        before = self._parts.get(storage_id(storage))
        if before is None:
            return
        self._parts[storage_id(storage)] = part
        self.live[before] -= storage.nbytes()
        self.live[part] += storage.nbytes()

    def _count_all(self, result: Any) -> None:
        """Count the memory of all tensors in the result of an operation."""
        if isinstance(result, Tensor):
            self._count(result.untyped_storage())
        elif isinstance(result, list | tuple):
            for item in result:
                self._count_all(item)

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed, unless it is counted already."""
        key = storage_id(storage)
        if key in self._parts:
            return
        size = storage.nbytes()
        self._parts[key] = self.part
        self.live[self.part] += size
        self._total += size
        # The Python object of a storage lives as long as its memory.
        weakref.finalize(storage, partial(self._free, key, size)).atexit = False
        if self._total > self._largest_total:
            self._largest_total = self._total
            self.peaks[self._phase] = Counter(self.live)

    def _free(self, key: int, size: int) -> None:
        """Stop counting a storage that is gone."""
        part = self._parts.pop(key)
        self.live[part] -= size
        self._total -= size


def _list_all_places(values: Tensor) -> Tensor:
    """Return the result of `nonzero` for values that are all nonzero; its numbers are no places."""
    return values.new_zeros((values.numel(), values.ndim), dtype=torch.long)


def _select_all(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return `indices` with masks replaced by the indices of as many elements as a mask has.

    A mask with several axes stands for as many tensors of indices.
    """
    replaced: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            replaced.append(index)
            continue
        places = index.new_zeros(index.numel(), dtype=torch.long)
        replaced += [places] * index.ndim
    return replaced
