"""Token mixer: a layer of a user in the place of an attention layer (docs/mixers.md).

Shapes: B batch, n tokens of this call, d width.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.cache import Buffer, Cache
from lit_attn.attention.masks import split_mask
from lit_attn.attention.spec import AttentionSpec
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.plugins import explain_failure, locate_code

OPTIONAL = ("is_causal", "present", "cache")
"""Arguments of a mixer's `forward` after the tokens, each of which it may lack."""


class TokenMixer(nn.Module):
    """Layer of a user, with the arguments of the attention layer.

    The user's class is called with the width, the number of heads and the arguments of the
    configuration. Its `forward` maps x (B, n, d) to (B, n, d). It may also take `is_causal` (True
    if no token may see a later one), `present` (B, n), False where a token is padding, and `cache`.

    Two attributes of the class describe what the layer cannot do: `needs_gpu = True` if it cannot
    run on a CPU, and `causal_only = True` if it must not be used without causal order.

    Options of attention, such as biases of projections, rotary positions and dropout of weights,
    do not concern the layer. `proj_drop` is the dropout rate of its output.
    """

    spec: ClassVar[AttentionSpec]
    local_self_attention: ClassVar[bool] = False

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        dim_out: int | None = None,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        """Raise ValueError if the class cannot be built, or if its `forward` cannot be called."""
        super().__init__()
        config = self.spec.mixer
        assert config is not None
        if dim_out not in (None, dim):
            raise ValueError(f"{config.target} has {dim} outputs, but {dim_out} are needed")
        self.target = config.target
        self.dim = dim
        self.num_heads = num_heads
        try:
            mixer_class = config.load()
        except ConfigError as error:
            raise ConfigError(f"attention: {error}") from error
        with contextlib.nullcontext() if device is None else torch.device(device):
            try:
                layer = mixer_class(dim, num_heads, **config.arguments)
            except Exception as error:
                # Code of a user can raise any exception.
                place = name_layer(config.target, mixer_class, "__init__")
                call = f"{mixer_class.__name__}({dim}, {num_heads}, ...)"
                failure = explain_failure(error, f"arguments: {place}, called as {call}")
                raise ConfigError(f"attention: {failure}") from error
        self.layer: Any = layer if dtype is None else layer.to(dtype)
        self.name = name_layer(config.target, mixer_class, "forward")
        self.taken = find_arguments(self.layer, self.target)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: Any = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output (B, n, d) for x (B, n, d).

        `attn_mask` hides padding, or padding and all later tokens. `rotary` is not used. Raises
        ValueError for another mask and for a `memory`, because the layer mixes one sequence.
        """
        if memory is not None:
            raise ValueError(f"{self.target} mixes one sequence; set `cross_attention`")
        if x.is_meta and self.declares_flops:
            # Kernels that torch cannot count may not run on the meta device either.
            return x + 0 * sum(parameter.sum() for parameter in self.parameters())
        if self.needs_gpu and x.device.type == "cpu":
            raise ValueError(f"{self.target} needs a GPU, but its tokens are on '{x.device}'")
        present, is_causal = self._read_mask(attn_mask, is_causal)
        if self.is_causal_only and not is_causal and cache is None:
            raise ValueError(f"{self.target} is causal only, and this model uses no causal order")
        if cache is None:
            output = self.call(x, is_causal, present)
        elif isinstance(cache, InputCache):
            inputs = cache.append(x)
            output = self.call(inputs, is_causal, present)[:, -x.shape[1] :]
        else:
            output = self.layer(x, **self._select(is_causal, present), cache=cache)
            self._check_output(output, x)
        if cache is not None:
            cache.advance(x.shape[1])
        return self.proj_drop(output)

    def call(self, x: Tensor, is_causal: bool, present: Tensor | None) -> Tensor:
        """Return the output of the user's layer, with the arguments that it takes."""
        try:
            output: Tensor = self.layer(x, **self._select(is_causal, present))
        except Exception as error:
            if not x.is_meta:
                raise
            # Code of a user can raise any exception.
            raise ConfigError(
                f"attention: {explain_failure(error, self.name)}, on the meta device, where FLOPs "
                "are counted; a method `flops(self, tokens)` can declare them"
            ) from error
        self._check_output(output, x)
        return output

    def _check_output(self, output: Any, x: Tensor) -> None:
        """Raise ConfigError if the layer's output is no tensor in the shape of the tokens x."""
        if not isinstance(output, Tensor):
            raise ConfigError(
                f"attention: {self.name}: must return a tensor, not {type(output).__name__}"
            )
        if output.shape != x.shape:
            raise ConfigError(
                f"attention: {self.name}: must return the shape of its tokens, {tuple(x.shape)}, "
                f"but returns {tuple(output.shape)}"
            )

    def new_cache(self) -> Cache:
        """Return an empty cache: that of the layer, or one of all inputs, computed again."""
        if "cache" in self.taken and hasattr(self.layer, "new_cache"):
            cache: Cache = self.layer.new_cache()
            return cache
        return InputCache()

    def set_depth(self, layer: int) -> None:
        """Tell the layer its number, which counts from 0, if it has a method `set_depth`."""
        set_depth = getattr(self.layer, "set_depth", None)
        if callable(set_depth):
            set_depth(layer)

    @property
    def needs_gpu(self) -> bool:
        """True if the layer cannot run on a CPU."""
        return bool(getattr(self.layer, "needs_gpu", False))

    @property
    def is_causal_only(self) -> bool:
        """True if the layer must not be used without causal order."""
        return bool(getattr(self.layer, "causal_only", False))

    @property
    def declares_flops(self) -> bool:
        """True if the layer has a method `flops(tokens)`."""
        return callable(getattr(self.layer, "flops", None))

    def _select(self, is_causal: bool, present: Tensor | None) -> dict[str, Any]:
        """Return the named arguments of a call that the layer takes."""
        arguments = {"is_causal": is_causal, "present": present}
        return {name: value for name, value in arguments.items() if name in self.taken}

    def _read_mask(self, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
        """Return which tokens are present, (B, n) or None, and whether the order is causal."""
        visible, bias = split_mask(attn_mask)
        if visible is None:
            return None, is_causal
        if bias is not None and not bias.is_meta and bias.any():
            raise ValueError(f"{self.target}: this model adds a position bias to logits")
        full = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
        # The last query sees all tokens but padding, in causal order too.
        present = full[:, 0, -1]
        if full.shape[2] == 1 or full.is_meta:
            return present, is_causal
        n = full.shape[-1]
        ordered = torch.ones(n, n, dtype=torch.bool, device=full.device).tril()[-full.shape[2] :]
        padding = present[:, None, None, :]
        # The keys that a query sees do not matter if it is padding.
        is_needed = padding[..., -full.shape[2] :].mT
        for is_ordered, expected in ((is_causal, padding), (True, padding & ordered)):
            if not ((full ^ expected) & is_needed).any():
                return present, is_ordered
        raise ValueError(
            f"{self.target}: this model hides tokens that are neither padding nor later ones"
        )


def name_layer(target: str, mixer_class: Any, method: str) -> str:
    """Return the name of a layer's class with file and line of the class, or of its `method`."""
    place = locate_code(vars(mixer_class).get(method, mixer_class))
    return f"{target} ({place})" if place else target


def find_arguments(layer: nn.Module, target: str) -> frozenset[str]:
    """Return the names in `OPTIONAL` that the layer's `forward` takes.

    Raises ValueError if `forward` needs an argument with another name.
    """
    _, *others = inspect.signature(layer.forward).parameters.values()
    for parameter in others:
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_needed = parameter.default is parameter.empty and not is_variable
        if is_needed and parameter.name not in OPTIONAL:
            raise ValueError(
                f"import: {target}: its forward needs an argument `{parameter.name}`; after the "
                f"tokens it can take {', '.join(OPTIONAL)}"
            )
    names = {parameter.name for parameter in others}
    return frozenset(names.intersection(OPTIONAL))


class InputCache(Cache):
    """Cache of all inputs (B, m, d) of a layer without a cache; each token computes all again."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Buffer(-2)

    def append(self, x: Tensor) -> Tensor:
        """Append the tokens x (B, n, d) and return the inputs of all tokens."""
        return self.inputs.append(x)

    def advance(self, n: int) -> None:
        super().advance(n)
        self.length = self.position

    def tensors(self) -> list[Tensor]:
        return [] if self.inputs.tensor is None else [self.inputs.tokens]


@contextlib.contextmanager
def declared_flops(network: nn.Module) -> Iterator[list[int]]:
    """Collect the FLOPs that layers of users declare for each of their forward passes."""
    declared: list[int] = []

    def record(mixer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(mixer, TokenMixer)
        batch, tokens, _ = inputs[0].shape
        declared.append(batch * int(mixer.layer.flops(tokens)))

    handles = [
        module.register_forward_pre_hook(record)
        for module in network.modules()
        if isinstance(module, TokenMixer) and module.declares_flops
    ]
    try:
        yield declared
    finally:
        for handle in handles:
            handle.remove()
