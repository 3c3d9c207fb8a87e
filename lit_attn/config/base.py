"""The base of everything a user writes in YAML."""

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    model_validator,
)

from lit_attn.config.errors import nearest


class Config(BaseModel):
    """Unknown keys are errors that name the nearest one; a built configuration never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key '{key}'{nearest(str(key), cls.model_fields)}")
        return value

    def identity(self) -> dict[str, Any]:
        """What this configuration computes: its values that differ from the defaults.

        Fields declared with `outside_identity` are left out, and so is every spelled-out default,
        so neither a path nor the order or completeness of the YAML changes it.
        """
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("identity") is False:
                continue
            value = getattr(self, name)
            if name == "kind" or value != field.get_default(call_default_factory=True):
                found[name] = _plain(value)
        return found


def outside_identity(default: Any, description: str) -> Any:
    """A field that says where or how fast a cell runs, not what it computes."""
    return Field(default, description=description, json_schema_extra={"identity": False})


class Kind(Config):
    """A choice among interchangeable things, told apart by `kind`.

    A direct subclass is a family. Its subclasses are the members, and writing one registers it.
    In YAML the kind alone may stand for the mapping: `residual: full` is `residual: {kind: full}`.
    """

    family: ClassVar[dict[str, type["Kind"]]]
    kind: str

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if Kind in cls.__bases__:
            cls.family = {}
        elif isinstance(kind := cls.model_fields["kind"].default, str):
            cls.family[kind] = cls


class OneOf:
    """`OneOf[Family]`: a field that holds one member of a family, looked up by its kind."""

    def __class_getitem__(cls, family: type[Kind]) -> Any:
        return SerializeAsAny[Annotated[family, BeforeValidator(_member_of(family))]]


def _member_of(family: type[Kind]) -> Any:
    def parse(value: Any) -> Any:
        if isinstance(value, family):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or "kind" not in given:
            raise ValueError(f"needs a kind{nearest('', family.family)}")
        kind = str(given["kind"])
        if kind not in family.family:
            name = family.__name__.lower()
            raise ValueError(f"'{kind}' is not a known {name}{nearest(kind, family.family)}")
        return family.family[kind].model_validate(given)

    return parse


def _plain(value: Any) -> Any:
    """`value` as JSON would hold it, configurations by their identity."""
    if isinstance(value, Config):
        return value.identity()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
