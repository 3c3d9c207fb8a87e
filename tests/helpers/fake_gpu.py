"""A simulated GPU for machines without one: shapes, dtypes and devices, but no numbers.

Inside `rehearsal`, CPU tensors work as usual, and tensors on "cuda" are torch's fake tensors: an
operation computes the shape, dtype and device of its result, casts under autocast as CUDA does, and
fails where a GPU fails, above all for operands on two devices. A value that is read is zero, and a
condition is true. So code that runs to the end would start on a GPU. PyTorch chooses its attention
kernel by type, width, mask, dropout, gradient and capability as in `choose_kernel`, and
flex_attention has the limits of its kernels. Numbers, time and memory are not simulated.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers.flex_on_cpu import flex_by_formula
from lit_attn.attention import flex

aten = torch.ops.aten

CUDA, LAZY = torch.device("cuda", 0), torch.device("lazy")

NAME = "rehearsed H100"

Capability = tuple[int, int]
H100: Capability = (9, 0)
CARDS_WITH_CUDNN: tuple[Capability, ...] = (H100, (10, 0))
CONSUMER_CARDS: tuple[Capability, ...] = ((8, 6), (8, 9))
# Bytes of shared memory that a program can have at most.
SHARED_MEMORY = {H100: 232_448, (8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (7, 5): 65_536}


class Event:
    """Stand-in for torch.cuda.Event, which measures time."""

    def __init__(self, enable_timing: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Generator(torch.Generator):
    """Generator on the CPU that can count as one on the GPU; torch passes on its C++ object."""

    on_gpu: ClassVar[dict[int, torch.Generator]] = {}

    def __new__(cls, device: Any = "cpu") -> "Generator":
        generator = super().__new__(cls)
        if torch.device(device).type == "cuda":
            cls.on_gpu[generator._cdata] = generator
        return generator


# Functions of torch.cuda that would call the driver.
DRIVER: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "get_device_name": lambda device=None: NAME,
    "is_bf16_supported": lambda including_emulation=True: True,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 1,
    "reset_peak_memory_stats": lambda device=None: None,
    "is_current_stream_capturing": lambda: False,
    "Event": Event,
}

NOISE = (
    # From Lightning: on the simulated GPU the length of a loader is zero.
    "Total length of .* across ranks is zero",
    # From copy.deepcopy.
    "Accessing the data pointer of FakeTensor",
)


@contextlib.contextmanager
def rehearsal(capability: Capability = H100) -> Iterator[list[str]]:
    """Simulate a machine with one GPU; yield the list of operations that waited for it.

    They read a value, or copied numbers of the CPU to the GPU.
    """
    gpu = FakeGPU(capability)
    autocast = torch.amp.autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__

    def entering(self: Any) -> Any:
        entered = enter(self)
        gpu.casts.append(torch.is_autocast_enabled("cuda"))
        return entered

    def leaving(self: Any, *error: Any) -> Any:
        gpu.casts.pop()
        return leave(self, *error)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message=message)
        for name, answer in DRIVER.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_MEMORY[capability])
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        for name, kernel in KERNELS.items():
            patch.setattr(
                torch.backends.cuda, name, functools.partial(_can_use, kernel, capability)
            )
        patch.setattr(flex, "flex_attention", _flex_with_limits)
        patch.setattr(flex, "create_block_mask", lambda mask_mod, *_: Order(mask_mod))
        patch.setattr(flex, "_compiled", lambda: flex.weighted_sums)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        patch.setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True))
        on_gpu = property(lambda self: self.device.type == "cuda")
        patch.setattr(FakeTensor, "is_cuda", on_gpu, raising=False)
        patch.setattr(autocast, "__enter__", entering)
        patch.setattr(autocast, "__exit__", leaving)
        patch.setattr(nn.Module, "_apply", gpu.apply_to)
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(Generator, "on_gpu", {})
        patch.setattr(torch, "save", _saving(torch.save))
        patch.setattr(torch, "load", unset_fake_temporarily()(torch.load))
        for operation, implementation in gpu.values().items():
            patch.setitem(fake_impls.op_implementations_dict, operation, implementation)
        with FakeTensorMode(allow_non_fake_inputs=True), gpu:
            yield gpu.reads


class FakeGPU(TorchDispatchMode):
    """Dispatch mode above torch's fake tensors that adds what they lack.

    Without a driver, torch's autograd engine has no queue for GPUs, but it has one for devices
    called "lazy". So C++ code sees the fake tensors on "lazy", except in autocast, which would not
    cast them there. Tensors that C++ code creates on "lazy" count as tensors on the GPU.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__()
        self.capability = capability
        self.reads: list[str] = []
        self.casts = [False]
        self.fresh: list[Any] = []
        self.leaves: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return self._device_for_cpp(args[0])
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if to is not None and to.type == "lazy":
            kwargs = {**kwargs, "device": (to := CUDA)}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            return args[0] if func is aten._pin_memory.default else False
        # Without a driver there is no pinned memory.
        kwargs = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
        if not fakes and (to is None or to.type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if fakes and to is not None and to.type == "cpu":
            self.reads.append(str(func))
            return _read(fakes[0], kwargs.get("dtype"))
        if (
            func is aten.copy_.default
            and not isinstance(args[0], FakeTensor)
            and args[2:] == (True,)
        ):
            # A copy to pinned memory does not wait; its values are those of a read.
            with unset_fake_temporarily():
                return args[0].copy_(_read(fakes[0], args[0].dtype))
        _refuse(func, args, leaves)
        on_cpu = any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in leaves)
        is_copy = func is aten.copy_.default and isinstance(args[0], FakeTensor)
        is_upload = on_cpu and (is_copy or (to is not None and to.type == "cuda"))
        if is_upload and not (kwargs.get("non_blocking") or args[2:] == (True,)):
            # Memory that is not pinned is copied once the GPU has done its work so far.
            self.reads.append(str(func))
        if func is aten._fused_sdp_choice.default:
            query, key, value, mask, dropout, is_causal = (*args, *DEFAULTS[len(args) :])
            needs_gradient = any(fake.requires_grad for fake in fakes)
            return choose_kernel(
                query, key, value, mask, dropout, is_causal, needs_gradient, self.capability
            ).value
        if func in UPDATES:
            assert len(fakes) == sum(isinstance(leaf, Tensor) for leaf in leaves)
            return None
        output = func(*args, **kwargs)
        recorded = torch.is_grad_enabled() and any(fake.requires_grad for fake in fakes)
        self.fresh = tree_leaves(output) if recorded else []
        return output

    def values(self) -> dict[Any, Callable[..., Any]]:
        """Return implementations of operations that depend on values, which fake tensors lack."""

        def zero(mode: Any, func: Any, x: Tensor) -> Any:
            self.reads.append(str(func))
            return _read(x, None).item()

        def everywhere(mode: Any, func: Any, x: Tensor) -> Tensor:
            self.reads.append(str(func))
            return x.new_empty((x.numel(), x.ndim), dtype=torch.long)

        def counts(
            mode: Any, func: Any, x: Tensor, weights: Tensor | None = None, minlength: int = 0
        ) -> Tensor:
            self.reads.append(str(func))
            return x.new_empty(max(minlength, 1), dtype=torch.long)

        def true(mode: Any, func: Any, *_: Any) -> bool:
            self.reads.append(str(func))
            return True

        return {
            aten.item.default: zero,
            aten._local_scalar_dense.default: zero,
            aten.nonzero.default: everywhere,
            aten.bincount.default: counts,
            aten.allclose.default: true,
            aten.equal.default: true,
        }

    @property
    def apply_to(self) -> Callable[..., nn.Module]:
        """`nn.Module._apply` with new parameters, because fake ones cannot become real."""

        def apply(
            module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
        ) -> nn.Module:
            for child in module.children():
                child._apply(fn)
            for name, old in module._parameters.items():
                if old is not None:
                    new = nn.Parameter(fn(old.detach()), old.requires_grad)
                    module._parameters[name] = new
                    if new.is_cuda and new.requires_grad:
                        # The node that accumulates its gradients, created outside of autocast.
                        self.leaves.append(new.view_as(new).grad_fn)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            return module

        return apply

    def _device_for_cpp(self, x: Any) -> torch.device:
        """Return the device that C++ code sees for a tensor.

        The first query about a new result comes from the autograd graph.
        """
        if any(x is one for one in self.fresh):
            self.fresh = [one for one in self.fresh if one is not x]
            return LAZY
        # Autocast is disabled while it casts.
        return CUDA if self.casts[-1] and not torch.is_autocast_enabled("cuda") else LAZY


# Updates of all parameters, which return nothing, and of which torch has no fake form.
UPDATES = (
    aten._fused_sgd_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.tensor_lr,
)

# Arguments 3 to 5 of PyTorch's choice of a kernel: mask, dropout and causal order.
DEFAULTS = (None, None, None, None, 0.0, False)

KERNELS = {
    "can_use_flash_attention": SDPBackend.FLASH_ATTENTION,
    "can_use_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
}


class Order(NamedTuple):
    """Mask of blocks with the part that the formula of flex_attention needs."""

    mask_mod: Callable[..., Tensor]


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    needs_gradient: bool,
    capability: Capability,
) -> SDPBackend:
    """Return PyTorch's choice for a device of this capability.

    Hopper and Blackwell cards prefer cuDNN's kernel, unless it is disabled.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if torch.backends.cuda.cudnn_sdp_enabled():
        kernels.insert(0, SDPBackend.CUDNN_ATTENTION)
    arguments = (query, key, value, mask, dropout, is_causal, needs_gradient, capability)
    for kernel in kernels:
        if supports(kernel, *arguments):
            return kernel
    return SDPBackend.MATH


def supports(
    kernel: SDPBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    needs_gradient: bool,
    capability: Capability,
) -> bool:
    """Return True if PyTorch's `kernel` computes attention with these arguments.

    Flash attention takes half precision from sm_80 on, no mask, one width up to 256 and as many
    queries as keys in causal order. On consumer cards its backward pass takes no width from 193 to
    224, and wider ones only without dropout. The efficient kernel takes float32 too, masks, and
    widths that fill 16 bytes. cuDNN's kernel takes half precision, masks and widths up to 128.
    """
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    width = max(widths)
    if kernel is SDPBackend.CUDNN_ATTENTION:
        return capability in CARDS_WITH_CUDNN and is_half and width <= 128 and width % 8 == 0
    if kernel is SDPBackend.EFFICIENT_ATTENTION:
        numbers = 8 if is_half else 4
        is_known = query.dtype in (torch.float16, torch.float32) or (
            query.dtype == torch.bfloat16 and capability >= (8, 0)
        )
        return is_known and all(one % numbers == 0 for one in widths)
    if not is_half or mask is not None or capability < (8, 0):
        return False
    if len(widths) > 1 or width > 256:
        return False
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    if needs_gradient and capability in CONSUMER_CARDS and width > 192:
        return width > 224 and dropout == 0
    return True


def _can_use(
    kernel: SDPBackend, capability: Capability, parameters: Any, debug: bool = False
) -> bool:
    """Return PyTorch's answer whether it can use `kernel` for these parameters."""
    tensors = [parameters.query, parameters.key, parameters.value]
    return supports(
        kernel,
        *tensors,
        parameters.attn_mask,
        parameters.dropout,
        parameters.is_causal,
        any(tensor.requires_grad for tensor in tensors),
        capability,
    )


def _flex_with_limits(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Any:
    """Return the result of flex_attention; raise the errors of its kernels."""
    if min(query.shape[-1], value.shape[-1]) < 16:
        raise NotImplementedError("NYI: embedding dimension of the query, key, and value")
    if query.dtype == torch.float64 or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"flex_attention: {query.dtype}, {key.dtype} and {value.dtype}")
    return flex_by_formula(query, key, value, *more, **named)


def _refuse(func: Any, args: tuple[Any, ...], leaves: list[Any]) -> None:
    """Raise the errors of a GPU that torch's fake tensors do not raise."""
    for leaf in leaves:
        if isinstance(leaf, torch._C.Generator) and leaf._cdata not in Generator.on_gpu:
            raise RuntimeError(f"{func}: expected a generator on cuda, not on the CPU")
    first = args[0] if args else None
    if isinstance(first, Tensor) and not isinstance(first, FakeTensor):
        if func._schema.is_mutable:
            raise RuntimeError(f"{func}: would change a CPU tensor by a tensor on the GPU")
        if func is aten.index.Tensor:
            raise RuntimeError(f"{func}: a CPU tensor with indices on the GPU")


def _read(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a CPU tensor with the shape of `x`: zeros, or True for booleans."""
    dtype = dtype or x.dtype
    with unset_fake_temporarily():
        return torch.full(x.shape, dtype == torch.bool, dtype=dtype)


def _saving(save: Callable[..., None]) -> Callable[..., None]:
    def saving(content: Any, *arguments: Any, **named: Any) -> None:
        save(tree_map_only(FakeTensor, Tensor.cpu, content), *arguments, **named)

    return saving
