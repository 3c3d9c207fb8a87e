"""The compiler of the tests that count graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.graph_counter import GraphCounter

from lit_attn.models import blocks
from lit_attn.private_names.of_torch import compiler_limits


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphCounter]:
    """Let `compile_blocks` use a GraphCounter, and fail where PyTorch would stop compiling."""
    backend = GraphCounter()
    compile_with = torch.compile

    def compile_forward(forward: Callable[..., Any], **options: Any) -> Any:
        return compile_with(forward, backend=backend)

    monkeypatch.setattr(blocks.torch, "compile", compile_forward)
    torch.compiler.reset()
    with compiler_limits(fail_on_recompile_limit_hit=True):
        yield backend
    torch.compiler.reset()
