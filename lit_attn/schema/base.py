"""Strict configurations and families of configurations that `kind` tells apart."""

import difflib
import json
import re
from abc import ABC
from collections.abc import Callable, Mapping
from functools import cache, cached_property, wraps
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from lit_attn.schema.errors import ConfigError, key_error, suggest
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.trust import is_foreign_file_open

WORDS = {
    "accumulate_grad_batches": "data.accumulate",
    "block_size": "data.context",
    "check_val_every_n_epoch": "training.evaluate_every",
    "clip_grad": "training.clip",
    "embed_dim": "model.dim",
    "eval_interval": "training.evaluate_every",
    "grad_clip": "training.clip",
    "gradient_accumulation_steps": "data.accumulate",
    "gradient_clip_val": "training.clip",
    "learning_rate": "optimizer.lr",
    "log_every_n_steps": "training.log_every",
    "logger": "training.loggers",
    "max_epochs": "training.epochs",
    "max_iters": "training.max_steps",
    "min_lr": "schedule.end",
    "n_embd": "model.dim",
    "n_head": "model.heads",
    "n_layer": "model.depth",
    "num_heads": "model.heads",
    "num_nodes": "slurm.nodes",
    "warmup_epochs": "schedule.warmup",
    "warmup_iters": "schedule.warmup: N steps",
    "warmup_steps": "schedule.warmup: N steps",
}
"""Keys of an experiment by words of nanoGPT, timm and Lightning, which name no section."""

Share = Annotated[float, Field(ge=0, lt=1)]
"""Number from 0 to below 1."""


def must_be(is_valid: Callable[[Any], object], wanted: str) -> AfterValidator:
    """Return a validator that raises "needs <wanted>"; the error repeats a value that is text."""

    def check(value: Any) -> Any:
        if is_valid(value):
            return value
        if isinstance(value, str):
            raise ValueError(f"needs {wanted}, not '{value}'")
        raise ValueError(f"needs {wanted}")

    return AfterValidator(check)


def consistency_check(method: Callable[[Any], None]) -> Any:
    """Return a method of a configuration as a check of all its values; it raises ValueError."""

    @wraps(method)
    def check(self: Any) -> Any:
        method(self)
        return self

    return model_validator(mode="after")(check)


def trial(method: Callable[[Any], None]) -> Any:
    """Return a consistency check that may import code of a user.

    It is left out for a file of somebody else, which is read to use its trained model.
    """

    @wraps(method)
    def check(self: Any) -> None:
        if not is_foreign_file_open():
            method(self)

    return consistency_check(check)


class Config(BaseModel):
    """Strict configuration: a wrong key or value is an error, and an instance never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    synonyms: ClassVar[Mapping[str, str]] = WORDS
    """Keys by words of other programs, for the message about an unknown key."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        """Refuse keys that are not fields, and booleans in place of numbers."""
        if not isinstance(value, dict):
            return value
        keys = [field.alias or name for name, field in cls.model_fields.items()]
        for key, item in value.items():
            is_known = key in cls.model_fields or key in keys
            if not is_known:
                meant = cls.synonyms.get(str(key))
                hint = suggest(str(key), keys) if meant is None else f"; write '{meant}'"
                raise key_error(key, f"unknown key '{key}'{hint}")
            if key not in _number_keys(cls):
                continue
            items = item if isinstance(item, list | tuple) else [item]
            if any(isinstance(number, bool) for number in items):
                raise key_error(key, "needs a number, not true or false")
        return value

    def model_copy(self, *, update: Any = None, deep: bool = False) -> Self:
        """Return a copy without cached properties, which belong to the values before `update`."""
        copy = super().model_copy(update=update, deep=deep)
        cached_names = copy.__dict__.keys() - type(self).model_fields.keys()
        for name in cached_names:
            del copy.__dict__[name]
        return copy

    @property
    def needs_foreign_code(self) -> bool:
        """True if code from outside the package computes this configuration or one in it."""
        return self._needs_foreign_code

    # A name without an underscore would be a key of `dict(config)` from the first call on.
    @cached_property
    def _needs_foreign_code(self) -> bool:
        """Return True if a configuration among the values needs code from outside the package."""
        configs = [value for _, value in self if isinstance(value, Config)]
        return any(config.needs_foreign_code for config in configs)

    def identity(self) -> dict[str, Any]:
        """Return what this configuration computes: its values that differ from the defaults.

        Fields declared with `outside_identity` are left out, and so is every default that is
        written out. Paths, the order of keys and the completeness of the YAML thus change nothing.
        """
        return self._identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Identity, computed once because thousands of cells share their configurations."""
        identity: dict[str, Any] = {}
        for name, default in _identity_defaults(type(self)).items():
            value = getattr(self, name)
            if name == "kind" or value != default:
                identity[name] = _to_plain(value)
        return identity

    def identity_json(self) -> str:
        """Return the identity as JSON, which the cells of all seeds share."""
        return self._identity_json

    @cached_property
    def _identity_json(self) -> str:
        """JSON text of the identity, written once because cells share their configurations."""
        return json.dumps(self.identity(), sort_keys=True, default=str)


def outside_identity(default: Any, description: str) -> Any:
    """Return a field that says where or how fast a cell runs, and not what it computes."""
    return Field(default, description=description, json_schema_extra={"identity": False})


class OwnClass(Config):
    """Configuration of a class of a user, from a file in `parts` or an installed package."""

    model_config = ConfigDict(populate_by_name=True)

    base_class: ClassVar[str]
    """Class that the imported class must derive from, as "module:Class"."""
    takes_functions: ClassVar[bool] = False
    """True if a function whose return annotation derives from the base class is accepted too."""

    target: str = Field(alias="import", description="the class, as mine:Net; also called `target`")
    arguments: dict[str, Any] = Field({}, description="arguments of the class")

    def load(self) -> Any:
        """Import the class and return it, without calling it.

        Raises ConfigError if there is none of this name, or if it does not derive from the base
        class: a file must not be able to call any function of any package.
        """
        return import_class(self.target, self.base_class, self.takes_functions)


class Kind(Config):
    """Base of the families.

    A direct subclass is a family. Each of its subclasses with a kind, as in
    `class FullConfig(ResidualConfig, kind="full")`, is a member and registers itself when it is
    defined; a field with the family's type takes any member. In YAML the kind alone can stand for
    the mapping: `residual: full` is `residual: {kind: full}`.
    """

    family: ClassVar[dict[str, type["Kind"]]]
    """Members of the family by kind."""
    default_kind: ClassVar[str | None] = None
    """Kind of a mapping without a kind; an identity does not contain it."""
    runs_foreign_code: ClassVar[bool] = False
    """True for a member that is or runs code from outside the package: a dry run tries it out.

    A member outside the package that sets False is not tried out.
    """
    own_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys whose value in another kind says nothing about this one: `--set` does not keep it."""
    kind: str = ""

    @property
    def needs_foreign_code(self) -> bool:
        return self.runs_foreign_code or super().needs_foreign_code

    def __init_subclass__(cls, *, kind: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if kind:
            # The same as `kind: Literal["full"] = "full"` in the body of the class.
            cls.__annotations__["kind"] = Literal[kind]
            cls.kind = kind
        if "runs_foreign_code" not in vars(cls) and not cls.__module__.startswith("lit_attn."):
            cls.runs_foreign_code = True
        if Kind in cls.__bases__:
            cls.family = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Register a class with a kind in its family; ConfigError if it is not complete."""
        kind = cls.model_fields["kind"].default
        if kind == "" or not isinstance(kind, str):
            return
        missing_constants = {name for name in cls.__class_vars__ if not hasattr(cls, name)}
        missing = sorted(cls.__abstractmethods__ | missing_constants)
        if missing:
            raise ConfigError(
                f"class {cls.__name__} (kind '{kind}') does not define {', '.join(missing)},"
                f" which every {cls.family_name()} has to define"
            )
        # A module that is imported again replaces its own members.
        other = cls.family.get(kind, cls)
        is_same_class = (
            other.__module__ == cls.__module__ and other.__qualname__ == cls.__qualname__
        )
        if not is_same_class:
            raise ConfigError(
                f"class {cls.__name__}: kind '{kind}' is already the name of"
                f" {other.__module__}.{other.__qualname__}; choose another name"
            )
        cls.family[kind] = cls

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema of a member, or for a family one that parses and dumps any member."""
        is_family = "family" in cls.__dict__
        if not is_family:
            return handler(source)
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda member, info: member.model_dump(mode=info.mode), info_arg=True
        )
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=dump)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema of a member, or for a family that of any of its members."""
        is_family = "family" in cls.__dict__
        if not is_family:
            return handler(schema)
        members = [handler(member.__pydantic_core_schema__) for member in cls.family.values()]
        return {"anyOf": [{"enum": sorted(cls.family)}, *members]}

    @classmethod
    def parse(cls, value: Any) -> "Kind":
        """Return the member that `value` (a kind, a mapping with a kind, or a member) describes.

        Raises ValueError, which names the nearest kind, if there is no such kind, and pydantic's
        ValidationError if the member does not accept the other keys.
        """
        if isinstance(value, cls):
            return value
        mapping = cls.expand_kind(value)
        if not isinstance(mapping, dict) or "kind" not in mapping:
            raise ValueError(f"needs a kind{suggest('', cls.family)}")
        kind = str(mapping["kind"])
        if kind not in cls.family:
            raise ValueError(
                f"'{kind}' is not a known {cls.family_name()}{cls._suggest_kind(kind)}"
            )
        return cls.family[kind].model_validate(mapping)

    @classmethod
    def _suggest_kind(cls, kind: str) -> str:
        """Return the end of the error message about an unknown kind."""
        if ":" in kind and "module" in cls.family:
            return f"; write {{kind: module, import: '{kind}'}}"
        suggestion = suggest(kind, cls.family)
        is_typo = difflib.get_close_matches(kind, cls.family, n=1, cutoff=0.75) != []
        if is_typo:
            return suggestion
        return f"{suggestion} (a kind of your own needs its file under `parts`)"

    @classmethod
    def expand_kind(cls, value: Any) -> Any:
        """Return the mapping that `value` stands for: a kind alone, or a mapping without a kind."""
        mapping = {"kind": value} if isinstance(value, str) else value
        if isinstance(mapping, dict) and cls.default_kind is not None:
            return {"kind": cls.default_kind} | mapping
        return mapping

    def try_out(self, signature: Any) -> Any:
        """Build and use what the member describes, in small, for data with `signature`.

        A dry run calls this for code from outside the package; any exception refuses the member.
        A model returns the output of its network for one sample.
        """

    @classmethod
    def family_name(cls) -> str:
        """Return the name of the family in words, for error messages."""
        family = next(base for base in cls.__mro__ if Kind in base.__bases__)
        name = family.__name__.removesuffix("Config")
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
        return words.lower()


def require_methods(cls: type, noun: str) -> None:
    """Raise ConfigError if `cls` lacks an abstract method, unless ABC is one of its bases."""
    missing = []
    for name in dir(cls):
        method = getattr(cls, name, None)
        if getattr(method, "__isabstractmethod__", False):
            missing.append(name)
    if missing and ABC not in cls.__bases__:
        raise ConfigError(
            f"class {cls.__name__} does not define {', '.join(missing)},"
            f" which every {noun} has to define"
        )


def load(target: str) -> Any:
    """Import "module:attribute" and return the attribute.

    A configuration class names the code that it builds in this form, because reading a study must
    import neither PyTorch nor a package that is built on top of the configuration.
    """
    module_name, _, attribute = target.partition(":")
    module = import_module(module_name)
    return getattr(module, attribute)


@cache
def _identity_defaults(config: type[Config]) -> dict[str, Any]:
    """Return the defaults of the fields that belong to an identity."""
    defaults = {}
    for name, field in config.model_fields.items():
        extra = field.json_schema_extra
        is_outside = isinstance(extra, dict) and extra.get("identity") is False
        if not is_outside:
            defaults[name] = field.get_default(call_default_factory=True)
    if issubclass(config, Kind) and defaults["kind"] == config.default_kind:
        del defaults["kind"]
    return defaults


@cache
def _number_keys(config: type[Config]) -> set[str]:
    """Return the fields that take numbers and no booleans; pydantic would read true as 1."""
    keys = set()
    for name, field in config.model_fields.items():
        types = leaf_types(field.annotation)
        takes_numbers = int in types or float in types
        if takes_numbers and bool not in types:
            keys.add(name)
    return keys


def leaf_types(annotation: Any) -> set[Any]:
    """Return the types in an annotation such as `tuple[int, ...] | None`, without containers."""
    arguments = get_args(annotation)
    if not arguments:
        return {annotation if isinstance(annotation, type) else type(annotation)}
    types: set[Any] = set()
    for argument in arguments:
        types |= leaf_types(argument)
    return types


def _to_plain(value: Any) -> Any:
    """Return `value` as JSON would hold it, with the identities of configurations in it."""
    if isinstance(value, Config):
        return value.identity()
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    return value
