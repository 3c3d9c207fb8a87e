"""Adapters: our attention layer in the place of another attention module, with its weights.

Shapes: B batch, n tokens, d width, H heads, D head width.
"""

import ast
import inspect
import math
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_attn.attention.layer import Attention, attn_layer
from lit_attn.attention.spec import AttentionSpec
from lit_attn.replace.projections import Projections, ScaledNorm, scale_queries

LINEAR_CLASSES = {
    "torch.nn.modules.linear:Linear",
    "torch.nn.modules.linear:NonDynamicallyQuantizableLinear",
    "torch.nn.modules.conv:Conv2d",
    "transformers.models.falcon.modeling_falcon:FalconLinear",
    "transformers.pytorch_utils:Conv1D",
}
"""Classes of projections whose output is a product with `weight`, plus `bias`, and nothing else."""

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of a module with the hooks of its calls, and of its state dict."""

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a parameter with the hooks of its gradient."""

LIBRARY_MARKS = frozenset({"_is_hf_initialized"})
"""Attributes of parameters that libraries set for themselves while they load a model."""

COLLECTOR = "transformers.utils.output_capturing"
"""Module whose hooks collect weights of attention, which calls of a replaced layer refuse."""


class Adapter(nn.Module, ABC):
    """Attention layer in the place of another module, with that module's `forward`.

    A subclass defines `read`, and `forward` with the arguments of the module. The module remains as
    `original`, because it computes its position biases and defines what the rest of the model
    reads. `detach` removes the attributes in `moved` from it.
    """

    adds_to_logits = True
    """True if masks or position biases are added to logits, which linear attention lacks."""

    moved: tuple[str, ...] = ("qkv", "proj", "q_norm", "k_norm", "attn_drop", "proj_drop")
    """Attributes of the original that the layer takes over; dots lead into its children."""

    known: ClassVar[tuple[str, ...] | None] = None
    """Further attributes of the original that the adapter models, or that change no output.

    Any other attribute is refused unless `is_neutral`. None switches this check off, for an adapter
    of one class whose options its author knows.
    """

    keeps_tokens: ClassVar[bool] = False
    """True if every layer of a stack of blocks sees the same tokens in the same order.

    A layer can then mix its values with those of the first layer. Windows have other tokens.
    """

    original: Any
    path: str = ""
    """Path of the module in the model, for errors of `forward`."""

    def __init__(self, original: nn.Module, spec: AttentionSpec) -> None:
        """Raise ValueError if a layer with `spec` cannot take the place of `original`.

        The original is not changed before `detach`.
        """
        super().__init__()
        if self.adds_to_logits and not spec.similarity.has_logits:
            raise ValueError(
                f"'{spec.similarity.kind}' attention has no logits, to which this module adds "
                "a mask or a position bias"
            )
        self.check_options(original)
        with torch.no_grad():
            self.layer = build_layer(self.read(original), spec)
        copy_marks(self.layer, original, self.moved)
        self.original = original

    def check_options(self, original: nn.Module) -> None:
        """Raise ValueError if `original` has an option that this adapter does not model."""
        if self.known is not None:
            check_options(original, {*self.moved, *self.known}, type(self).__name__)
        check_projections(original, self.moved)

    @classmethod
    def check_place(cls, parent: nn.Module, name: str, spec: AttentionSpec) -> None:
        """Raise ValueError if `parent` calls its child `name` in a way that `spec` cannot compute.

        A class whose calls do not depend on the parent inherits this method.
        """

    def check_call(self, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise ValueError if the layer cannot compute a call with these arguments."""

    @abstractmethod
    def read(self, original: Any) -> Projections:
        """Return the projections of `original`; raise ValueError if it computes anything else.

        `original` and its weights must stay unchanged.
        """

    def detach(self) -> None:
        """Remove from the original what the layer has taken over."""
        for name in self.moved:
            parent, _, child = name.rpartition(".")
            owner = self.original.get_submodule(parent)
            if hasattr(owner, child):
                delattr(owner, child)

    def refusal(self, reason: str) -> ValueError:
        """Return the error for a call that the layer cannot compute."""
        name = type(self.original).__name__
        return ValueError(
            f"{self.path or 'the attention layer'} ({name}): {reason}; "
            "name this layer in `skip` to leave it as it is"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)


def check_options(original: nn.Module, known: Collection[str], adapter: str) -> None:
    """Raise ValueError if `original` has an option outside `known` that may change its output.

    Options are the public attributes, parameters, buffers and children of the module, and the keys
    of its `config` that the code of its class reads.
    """
    for name, value in list_attributes(original).items():
        if name not in known and not is_neutral(value, name):
            raise ValueError(
                f"its option `{name}` ({describe(value)}) is unknown to the adapter {adapter}, "
                "so its layer might compute something else"
            )
    config = getattr(original, "config", None)
    for name in read_config_keys(type(original)):
        value = getattr(config, name, None)
        if name not in known and not is_neutral(value, name):
            raise ValueError(
                f"its option `config.{name}` ({describe(value)}) is unknown to the adapter "
                f"{adapter}, so its layer might compute something else"
            )


def check_projections(original: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError if a projection in `names` is more than a product with its weight.

    Examples are low-rank adapters, quantised weights, parametrisations, hooks and patches.
    """
    check_calls(original, "it")
    for name in names:
        module: Any = original
        for attribute in name.split("."):
            module = getattr(module, attribute, None)
        if not isinstance(module, nn.Module):
            continue
        weight = getattr(module, "weight", None)
        # A norm of each head, as in Cohere, has weights of two axes.
        is_projection = isinstance(weight, Tensor) and weight.ndim > 1 and "norm" not in name
        # The weight of a quantised projection is a method.
        is_projection = is_projection or callable(weight)
        if is_projection and class_name(module) not in LINEAR_CLASSES:
            raise ValueError(
                f"its `{name}` is a {class_name(module)}, which may compute more than a product "
                "with its weight; replace the attention before this class is applied, and before a "
                "quantisation"
            )
        # A parametrisation has hooks of its own.
        check_calls(module, f"its `{name}`")


def check_calls(module: nn.Module, name: str) -> None:
    """Raise ValueError if `module`, which the error calls `name`, has hooks or a patched `forward`.

    The replaced module is not called any more, so both would stop without a word.
    """
    if has_patched_forward(module):
        raise ValueError(
            f"{name} has a `forward` that is not that of its class {class_name(module)}, and it "
            "would not be called any more; replace the attention before this patch is applied"
        )
    registered: list[Any] = []
    for attribute in HOOKS:
        registered.extend(getattr(module, attribute).values())
    if any(getattr(hook, "__module__", None) != COLLECTOR for hook in registered):
        raise ValueError(
            f"{name} has hooks, which would not be called any more; remove them before the "
            "replacement and register them on the new layer"
        )


def has_patched_forward(module: nn.Module) -> bool:
    """Return True if `forward` was set on `module`, or on its class by another file."""
    if "forward" in vars(module):
        return True
    for base in type(module).__mro__:
        if "forward" in vars(base):
            function = inspect.unwrap(vars(base)["forward"])
            return getattr(function, "__module__", base.__module__) != base.__module__
    return False


def list_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes, parameters, buffers and children of `module` by name.

    They stand in the order in which the module has got them, and those that are None come last.
    """
    names = list(vars(module))
    names += [name for name, _ in module.named_parameters(recurse=False)]
    names += [name for name, _ in module.named_buffers(recurse=False)]
    names += [name for name, _ in module.named_children()]
    attributes = {}
    for name in dict.fromkeys([*names, *dir(module)]):
        is_of_class = name not in vars(module) and hasattr(type(module), name)
        if not name.startswith("_") and name not in MODULE_ATTRIBUTES and not is_of_class:
            attributes[name] = getattr(module, name)
    return attributes


def read_config_keys(module_class: type) -> list[str]:
    """Return the keys of `self.config` that the code of a class reads, in their order."""
    try:
        source = inspect.getsource(module_class)
    except (OSError, TypeError):
        # A class that was defined interactively has no source.
        return []
    keys: list[str] = []
    for key in re.findall(r"self\.config\.(\w+)", source):
        if key not in keys:
            keys.append(key)
    return keys


def list_unread(original: nn.Module) -> set[str]:
    """Return the attributes of `original` that no method of its class reads but the constructor.

    The set is empty for a class without source, which was defined interactively.
    """
    read: set[str] = set()
    for base in type(original).__mro__:
        if base is nn.Module:
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            return set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                read.update(re.findall(r"\bself\.(\w+)", ast.unparse(node)))
    return set(list_attributes(original)) - read


def is_neutral(value: Any, name: str) -> bool:
    """Return True for a value that switches an option off: None, False, identity, or a rate of 0.

    The rates of dropout in the libraries have `drop` in their names.
    """
    if isinstance(value, nn.Dropout):
        return value.p == 0
    if "drop" in name and isinstance(value, int | float):
        return value == 0
    return value is None or value is False or isinstance(value, nn.Identity)


def describe(value: Any) -> str:
    """Return an attribute's value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__name__}"
    return repr(value)[:40]


def class_name(module: nn.Module) -> str:
    """Return the class of `module` as "module:class"."""
    return f"{type(module).__module__}:{type(module).__qualname__}"


def build_layer(source: Projections, spec: AttentionSpec) -> Attention:
    """Return a layer with the modules of `source`; raise ValueError if `spec` does not fit them.

    A layer of a user has its own initial weights, and only the sizes of `source`.
    """
    heads = source.heads
    key_heads = source.key_heads or heads
    if spec.kv_heads not in (None, key_heads):
        raise ValueError(f"kv_heads: {spec.kv_heads}, but the module has {key_heads} key heads")
    if spec.mixer is not None:
        return attn_layer(spec)(
            source.qkv.in_features,
            heads,
            dim_out=source.proj.out_features,
            proj_drop=source.proj_drop,
            device=source.qkv.weight.device,
            dtype=source.qkv.weight.dtype,
        )
    has_groups = key_heads != heads
    grouped_spec = spec.model_copy(update={"kv_heads": key_heads if has_groups else None})
    head_dim = source.qkv.out_features // (heads + 2 * key_heads)
    layer = attn_layer(grouped_spec)(
        source.qkv.in_features,
        heads,
        attn_head_dim=head_dim,
        dim_out=source.proj.out_features,
        qkv_bias=source.qkv.bias is not None,
        proj_bias=source.proj.bias is not None,
        attn_drop=source.attn_drop,
        proj_drop=source.proj_drop,
        device=source.qkv.weight.device,
        dtype=source.qkv.weight.dtype,
    )
    layer.qkv = source.qkv
    layer.proj = source.proj
    if source.q_norm is not None:
        layer.q_norm = source.q_norm
    if source.k_norm is not None:
        layer.k_norm = source.k_norm
    # The layer multiplies logits by 1 / sqrt(D), so another scale is a factor of the queries.
    if source.scale is not None and not math.isclose(source.scale, head_dim**-0.5):
        factor = source.scale * head_dim**0.5
        if isinstance(layer.q_norm, nn.Identity):
            layer.qkv = scale_queries(source.qkv, heads * head_dim, factor)
        else:
            layer.q_norm = ScaledNorm(layer.q_norm, factor)
    layer.copy_projection()
    return layer


def copy_marks(layer: Attention, original: nn.Module, names: Iterable[str]) -> None:
    """Give the copies in `layer` of the parameters `names` of `original` what these are marked by.

    Marks are the flag of a frozen parameter and attributes, such as tags for an optimiser. Weights
    and biases are decided separately. A layer of a user has no copies. Raises ValueError if the
    marks of copied parameters differ, because the layer has one matrix for all projections, and for
    a hook of a gradient.
    """
    if layer.spec.mixer is not None:
        return
    kept = set(layer.parameters())
    marks: dict[bool, dict[str, Any]] = {}
    for name, parameter in original.named_parameters():
        is_moved = any(name == moved or name.startswith(f"{moved}.") for moved in names)
        if not is_moved or parameter in kept:
            continue
        if any(getattr(parameter, hooks, None) for hooks in PARAMETER_HOOKS):
            raise ValueError(
                f"its `{name}` has a hook of its gradient, which would not be called any more; "
                "remove it before the replacement and register it on the new layer"
            )
        own_marks = read_marks(parameter)
        first = marks.setdefault(is_bias(name), own_marks)
        if own_marks["requires_grad"] != first["requires_grad"]:
            raise ValueError(
                "some of its projections are frozen and others are not; "
                "set requires_grad after the replacement"
            )
        if own_marks != first:
            raise ValueError(
                f"its `{name}` has other attributes ({', '.join(own_marks)}) than the projections "
                "beside it, with which it becomes one matrix; set them after the replacement"
            )
    original_parameters = set(original.parameters())
    for child in (layer.qkv, layer.proj, layer.q_norm, layer.k_norm):
        for name, parameter in child.named_parameters():
            if parameter in original_parameters:
                continue
            for mark, value in marks.get(is_bias(name), {}).items():
                setattr(parameter, mark, value)


def read_marks(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the flag of a frozen parameter and its attributes, without those of libraries."""
    marks: dict[str, Any] = {"requires_grad": parameter.requires_grad}
    marks |= {name: value for name, value in vars(parameter).items() if name not in LIBRARY_MARKS}
    return marks


def is_bias(name: str) -> bool:
    """Return True for a bias such as `bias`, `q_bias` or `in_proj_bias`."""
    return name.rpartition(".")[2].endswith("bias")


def describe_cross_problem(problem: str) -> str:
    """Return the reason of `AttentionSpec.find_cross_problem` without its remedy for YAML."""
    return f"its keys belong to another sequence: {problem.partition(';')[0]}"
