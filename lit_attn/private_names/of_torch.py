"""Uses of PyTorch's private names; NAMES in lit_attn.private_names explains each."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "BatchNormBase",
    "TorchDispatchMode",
    "outside_compiled_code",
    "tree_flatten",
    "tree_unflatten",
]

M = TypeVar("M", bound=nn.Module)

outside_compiled_code = torch._disable_dynamo
"""Decorator of a function that compiled code calls as it is. It imports the compiler, which takes
over a second, with the first call; `torch.compiler.disable` imports it with the definition."""

aten = torch.ops.aten
cpu_flash_forward = aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_forward = aten._scaled_dot_product_flash_attention
flash_backward = aten._scaled_dot_product_flash_attention_backward
efficient_forward = aten._scaled_dot_product_efficient_attention
efficient_backward = aten._scaled_dot_product_efficient_attention_backward


def is_in_backward() -> bool:
    """Return True while gradients are computed: a forward pass is then a repetition."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that runs now."""
    Variable._execution_engine.queue_callback(callback)


def is_in_forward_mode() -> bool:
    """Return True while derivatives in forward mode are computed."""
    return forward_ad._current_level >= 0


def hides_tangents() -> bool:
    """Return True if a transform of torch.func hides tangents of an outer one."""
    transforms = torch._C._functorch.get_interpreter_stack() or []
    jvp = torch._C._functorch.TransformType.Jvp
    return len(transforms) > 1 or any(transform.key() != jvp for transform in transforms)


def preferred_kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> int:
    """Return the number of the kernel that scaled-dot-product attention would call."""
    return torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal)


def mark_static(tensor: Tensor, axis: int) -> None:
    """Let the compiler take the size of an axis for a constant."""
    torch._dynamo.mark_static(tensor, axis)


def compiler_limits(**limits: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context with settings of torch._dynamo."""
    return torch._dynamo.config.patch(**limits)


def raise_compiler_limit(variants: int) -> None:
    """Let torch._dynamo compile at least so many variants of one function in this process."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, variants)


def empty_compiler_cache() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch.compile finds nothing that was compiled before."""
    # Importing the compiler takes longer than most commands.
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def compiler_counters() -> dict[str, Counter[str]]:
    """Return what torch._dynamo has counted, by subject."""
    return torch._dynamo.utils.counters


def list_hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the functions that a call of a module, and its gradient, also call, by their kind."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def has_hooks(module: nn.Module) -> bool:
    """Return True if calling a module calls further functions."""
    return any(len(hooks) > 0 for hooks in list_hooks(module))


def copy_without_hooks(module: M) -> M:
    """Return a copy of a module that calls no hooks: those of a profiler cannot be copied."""
    copies: dict[int, Any] = {}
    for part in module.modules():
        for hooks in list_hooks(part):
            # deepcopy takes what stands here for the copy of the object with this id.
            copies[id(hooks)] = type(hooks)()
    return copy.deepcopy(module, copies)


def takes_generator(operation: Any) -> bool:
    """Return True if an operation has an argument `generator`."""
    return any(part.name == "generator" for part in operation._schema.arguments)


def multiply_in_place(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one factor, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def end_workers(loader: Any) -> None:
    """End the workers of a DataLoader and wait for their ends."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
