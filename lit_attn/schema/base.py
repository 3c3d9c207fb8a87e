"""The base of everything a user writes in YAML."""

from functools import cache, cached_property
from importlib import import_module
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from lit_attn.schema.errors import suggest, unknown_key


class Config(BaseModel):
    """Unknown keys are errors that name the nearest one; a built configuration never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    raise unknown_key(key, cls.model_fields)
        return value

    def identity(self) -> dict[str, Any]:
        """What this configuration computes: its values that differ from the defaults.

        Fields declared with `outside_identity` are left out, and so is every spelled-out default,
        so neither a path nor the order or completeness of the YAML changes it.
        """
        return self._identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Found once: thousands of cells share their parts, and none of them ever changes."""
        found: dict[str, Any] = {}
        for name, default in _defaults(type(self)).items():
            value = getattr(self, name)
            if name == "kind" or value != default:
                found[name] = _plain(value)
        return found


@cache
def _defaults(of: type[Config]) -> dict[str, Any]:
    """The fields that belong to an identity, with the values that leave it alone."""
    found = {}
    for name, field in of.model_fields.items():
        extra = field.json_schema_extra
        if not isinstance(extra, dict) or extra.get("identity") is not False:
            found[name] = field.get_default(call_default_factory=True)
    return found


def load(target: str) -> Any:
    """Import "module:attribute" and return the attribute.

    A configuration class names the code that it builds in this form, because reading a study must
    import neither PyTorch nor a package that is built on top of the configuration.
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def outside_identity(default: Any, description: str) -> Any:
    """A field that says where or how fast a cell runs, not what it computes."""
    return Field(default, description=description, json_schema_extra={"identity": False})


class Kind(Config):
    """A choice among interchangeable things, told apart by `kind`.

    A direct subclass is a family. Its subclasses are the members, and writing one registers it; a
    field of the family's type holds one member. In YAML the kind alone may stand for the mapping:
    `residual: full` is `residual: {kind: full}`.
    """

    family: ClassVar[dict[str, type["Kind"]]]
    kind: str

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if Kind in cls.__bases__:
            cls.family = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if not isinstance(kind := cls.model_fields["kind"].default, str):
            return
        known = cls.family.setdefault(kind, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            there = f"{known.__module__}.{known.__qualname__}"
            raise ValueError(f"kind '{kind}' is {there} already; {cls.__qualname__} needs another")
        cls.family[kind] = cls

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        if "family" not in cls.__dict__:
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda member, info: member.model_dump(mode=info.mode), info_arg=True
            ),
        )

    @classmethod
    def parse(cls, value: Any) -> "Kind":
        """The member that `value` (a kind, a mapping with a kind, or a member) describes.

        Raises ValueError with the nearest kind where there is none, and pydantic's ValidationError
        where the member does not accept the rest.
        """
        if isinstance(value, cls):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or "kind" not in given:
            raise ValueError(f"needs a kind{suggest('', cls.family)}")
        kind = str(given["kind"])
        if kind not in cls.family:
            family = cls.__name__.lower()
            raise ValueError(f"'{kind}' is not a known {family}{suggest(kind, cls.family)}")
        return cls.family[kind].model_validate(given)


def _plain(value: Any) -> Any:
    """`value` as JSON would hold it, configurations by their identity."""
    if isinstance(value, Config):
        return value.identity()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
