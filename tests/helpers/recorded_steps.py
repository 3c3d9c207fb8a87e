"""A recorder of training steps on a CPU, with the rules of a CUDA graph.

A record is the list of operations below autograd, with the very tensors that they read and wrote.
A replay runs them once more on these tensors: numbers of Python stay those of the record, and a
tensor that was replaced since is not seen. As during the recording of a CUDA graph, no value can be
read, and no size can depend on values. Here the recording computes the step, so the first replay
after it has nothing left to do.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_attn.models import token_loss
from lit_attn.tasks import step_graph
from lit_attn.tasks.step_graph import Recorder, StepOutputs, Work
from lit_attn.training import build

aten = torch.ops.aten

READS = (
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.bincount.default,
    aten.masked_select.default,
    aten._unique2.default,
)
"""Operations for which the host waits for the device."""

MESSAGE = "operation not permitted when stream is capturing"


class Operation(NamedTuple):
    """An operation with its arguments and the results that it had."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


class OperationList(TorchDispatchMode):
    """Mode that keeps all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        options = options or {}
        has_mask = function is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in arguments[1]
        )
        if function in READS or has_mask:
            raise RuntimeError(f"{MESSAGE}: {function}")
        result = function(*arguments, **options)
        if not function.is_view:
            self.operations.append(Operation(function, arguments, options, result))
        return result


class RecordingCPU(Recorder):
    """Recorder of steps on a CPU."""

    replays = 0

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.is_computed = False

    def warm_up(self, work: Work) -> StepOutputs:
        return work()

    def record(self, work: Work) -> StepOutputs:
        with OperationList() as kept:
            outputs = work()
        self.operations = kept.operations
        self.is_computed = True
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        type(self).replays += 1
        if self.is_computed:
            self.is_computed = False
            return
        for operation in self.operations:
            result = operation.function(*operation.arguments, **operation.options)
            kept = tree_leaves(operation.result)
            for target, source in zip(kept, tree_leaves(result), strict=True):
                # An operation that changes its argument returns it.
                if isinstance(target, Tensor) and target is not source:
                    target.copy_(source)


class NoRecord(RecordingCPU):
    """Recorder that makes every step without a record."""

    work: Work

    def record(self, work: Work) -> StepOutputs:
        raise AssertionError("every step is a part of the warm-up")


def use(monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder] = RecordingCPU) -> None:
    """Train cells with `compile: step` on a CPU, uncompiled, with this recorder."""
    monkeypatch.setattr(build, "should_compile", lambda experiment, device: False)
    monkeypatch.setattr(build, "CudaRecorder", recorder)
    # A GPU computes the logits of all tokens, as fixed shapes need.
    monkeypatch.setattr(token_loss, "find_targets", lambda targets: None)
    monkeypatch.setattr(RecordingCPU, "replays", 0)
    if recorder is NoRecord:
        monkeypatch.setattr(step_graph, "WARM_UP_STEPS", 10**9)
