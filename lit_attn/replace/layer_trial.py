"""Trial of an adapter of transformers: the old layer and the standard layer compute the same.

Both get random weights and inputs in double precision, without and with a mask of padding, and in
pieces with a cache. What an adapter has not read, such as a clip, then shows as a difference.

Shapes: B batch, n tokens, d width.
"""

import copy
import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_attn.attention.spec import AttentionSpec
from lit_attn.private_names.of_transformers import read_implementation
from lit_attn.replace.adapter import list_attributes
from lit_attn.replace.rotary_layouts import spread_angles
from lit_attn.replace.transformers_layers import Hub, read_config

TOKENS = 7
PADDING = 2
CUTS = (0, 4, 5, TOKENS)
"""Borders of the pieces that come with a cache."""

LIMIT = 1e-9
"""Largest difference, as a part of the largest output."""

TRIED: dict[str, bool] = {}
"""Outcomes of trials by what they depend on: True if the layer rotates queries and keys."""

GIVEN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids"}
"""Arguments of `forward` for which a trial has values."""


def prove(new: Hub, original: nn.Module) -> None:
    """Set whether `new` rotates queries and keys; raise ValueError if it computes something else.

    A class whose `forward` needs other arguments is not tried, and its adapter is trusted.
    """
    for name, parameter in inspect.signature(original.forward).parameters.items():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_needed = parameter.default is parameter.empty and not is_variable
        if is_needed and name not in GIVEN | {"past_key_values"}:
            return
    has_lost_buffers = any(buffer.is_meta for buffer in original.buffers())
    if has_lost_buffers:
        return
    key = describe_trial(type(new), original)
    if key not in TRIED:
        # A trial draws numbers, and those of the model must stay as they are.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            TRIED[key] = try_layer(type(new), original)
    new.has_rotary = TRIED[key]


def describe_trial(adapter: type[Hub], original: nn.Module) -> str:
    """Return a text that is equal for layers which differ in the values of their weights alone."""
    parts = [str(adapter), str(type(original)), str(type(original).forward)]
    for module in original.modules():
        for name, value in sorted(list_attributes(module).items()):
            if isinstance(value, Tensor):
                parts.append(f"{name} {tuple(value.shape)}")
            elif name != "layer_idx" and not isinstance(value, nn.Module) and name != "config":
                parts.append(f"{name} {value}")
    config = read_config(original)
    if config is not None:
        parts.append(f"{read_implementation(config)} {config}")
    return "\n".join(parts)


def try_layer(adapter: type[Hub], original: nn.Module) -> bool:
    """Return True if the layer rotates; raise ValueError if it is not the standard layer."""
    theirs = make_sample(original)
    problems = []
    for has_rotary in (True, False):
        ours = adapter(copy.deepcopy(theirs), AttentionSpec()).eval()
        ours.has_rotary = has_rotary
        with Double():
            problem = Trial(theirs, ours).find_difference()
        if not problem:
            return has_rotary
        problems.append(problem)
        if ours.rotation is None:
            break
    raise ValueError(problems[0])


def make_sample(original: nn.Module) -> nn.Module:
    """Return a copy of a layer with random weights in double precision, in evaluation mode."""
    sample = copy.deepcopy(original)
    if any(parameter.is_meta for parameter in sample.parameters()):
        sample.to_empty(device="cpu")
    sample = sample.cpu().double().eval()
    for parameter in sample.parameters():
        parameter.requires_grad_(False)
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            # Logits of several units show a cap.
            parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(1 + 0.3 * noise)
    return sample


class Double(TorchFunctionMode):
    """Mode in which code that asks for single precision gets double precision.

    Softmaxes, norms and rotations of transformers are in single precision, which would hide small
    differences.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        if func is Tensor.float:
            return args[0].double()
        values = [torch.float64 if value is torch.float32 else value for value in args]
        return func(*values, **named)


class Trial:
    """Inputs of an old layer, `theirs`, and of its replacement, `ours`."""

    def __init__(self, theirs: nn.Module, ours: Hub) -> None:
        self.theirs = theirs
        self.ours = ours
        self.x = torch.randn(2, TOKENS, ours.layer.qkv.in_features, dtype=torch.double)
        self.present = torch.ones(2, TOKENS, dtype=torch.bool)
        padded = slice(PADDING) if ours.is_causal else slice(TOKENS - PADDING, None)
        self.present[1, padded] = False
        self.angles: tuple[Tensor, Tensor] | None = None
        if ours.rotation is not None:
            width = ours.read_rotated_width(theirs)
            angles = 3 * torch.randn(2, TOKENS, width // 2, dtype=torch.double)
            layout = ours.rotation.angles
            self.angles = spread_angles(angles.cos(), layout), spread_angles(angles.sin(), layout)

    def find_difference(self) -> str:
        """Return where the two layers differ, or an empty text."""
        takes_mask = "attention_mask" in self.ours.names
        # The eager code of transformers has no order without a mask.
        is_eager = read_implementation(read_config(self.theirs)) == "eager"
        if not (is_eager and self.ours.is_causal):
            problem = self._compare("without a mask", False, (0, TOKENS))
            if problem:
                return problem
        if takes_mask:
            problem = self._compare("with a mask of padding", True, (0, TOKENS))
            if problem:
                return problem
        if takes_mask and self.ours.is_causal and "past_key_values" in self.ours.names:
            return self._compare("from a cache", True, CUTS)
        return ""

    def _compare(self, place: str, has_mask: bool, cuts: tuple[int, ...]) -> str:
        try:
            expected = self._compute(self.theirs, has_mask, cuts)
            outputs = self._compute(self.ours, has_mask, cuts)
        except Exception as error:
            # Code of any class of transformers runs here.
            return f"it cannot be tried {place}: {type(error).__name__}: {error}".split("\n")[0]
        if has_mask:
            expected, outputs = expected[self.present], outputs[self.present]
        if expected.shape != outputs.shape:
            return f"{place}, its outputs have another shape than those of the standard layer"
        difference = (outputs - expected).abs().max() / expected.abs().max()
        if difference < LIMIT:
            return ""
        return (
            f"{place}, it differs from the standard layer by {difference:.1e} of its largest "
            f"output, so its class computes something that {type(self.ours).__name__} does not read"
        )

    def _compute(self, layer: nn.Module, has_mask: bool, cuts: tuple[int, ...]) -> Tensor:
        """Return the outputs of all tokens, which come in pieces."""
        cache = None
        if len(cuts) > 2:
            from transformers import DynamicCache

            cache = DynamicCache()
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            arguments = self._make_arguments(start, stop, has_mask)
            arguments["past_key_values"] = cache
            output = layer(**{k: v for k, v in arguments.items() if k in self.ours.names})
            pieces.append(output[0] if isinstance(output, tuple) else output)
        return torch.cat(pieces, 1)

    def _make_arguments(self, start: int, stop: int, has_mask: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {"hidden_states": self.x[:, start:stop].contiguous()}
        arguments["position_ids"] = torch.arange(start, stop).unsqueeze(0)
        arguments["attention_mask"] = self._make_mask(start, stop) if has_mask else None
        if self.angles is not None:
            cos, sin = self.angles
            arguments["position_embeddings"] = cos[:, start:stop], sin[:, start:stop]
        return arguments

    def _make_mask(self, start: int, stop: int) -> Tensor:
        """Return a mask as transformers makes it, (2, 1, stop - start, stop)."""
        visible = self.present[:, None, None, :stop].expand(-1, 1, stop - start, -1)
        if self.ours.is_causal:
            visible = visible & torch.ones(stop, stop, dtype=torch.bool).tril()[start:]
        if read_implementation(read_config(self.theirs)) != "eager":
            return visible
        lowest = torch.finfo(torch.double).min
        return torch.zeros(visible.shape, dtype=torch.double).masked_fill(~visible, lowest)
