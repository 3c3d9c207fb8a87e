"""Import of a class that a configuration names, as in `import: "mine:Net"`.

A name in a file must not call any function of any package: `os:system` with the argument `command`
would run a command. So the class is checked before anything is called.
"""

import typing
from importlib import import_module
from typing import Any

from lit_attn.schema.errors import ConfigError, require
from lit_attn.schema.plugins import run_import


def import_class(target: str, base: str, takes_functions: bool = False) -> Any:
    """Import "module:Class" and return the class, without calling it.

    `base` names, in the same form, the class that it must derive from. With `takes_functions` a
    function is returned too if its return annotation is a class that derives from the base. Raises
    ConfigError if the module cannot be imported or has no such class.
    """
    name, _, attribute = target.partition(":")
    place = f"import: {target}"
    imported = _import_module(name, place)
    module_name, _, class_name = base.partition(":")
    base_class = getattr(import_module(module_name), class_name)
    if attribute not in dir(imported):
        require(f"import: module '{name}' has no", attribute, _list_choices(imported, base_class))
    # A package may import the module of an attribute when the attribute is read.
    value: Any = run_import(lambda: getattr(imported, attribute), place)
    if _derives(value, base_class):
        return value
    if takes_functions and _derives(_read_return_type(value), base_class):
        return value
    base_name = base.replace(":", ".")
    or_function = ", or a function with such a return annotation" if takes_functions else ""
    raise ConfigError(
        f"import: {target} is not a subclass of {base_name}; it is {_describe(value)}. "
        f"Name a class that derives from {base_name}{or_function}."
    )


def _import_module(name: str, place: str) -> Any:
    """Import the module `name`; ConfigError, which begins with `place`, if that is not possible."""
    has_empty_part = "" in name.split(".")
    if has_empty_part:
        raise ConfigError(f"{place}: is not in the form MODULE:CLASS, as mine:Net")
    try:
        return run_import(lambda: import_module(name), place)
    except ConfigError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise ConfigError(
            f"{place}: {error.__cause__};"
            " write MODULE:CLASS, with the file of the module in `parts`"
        ) from error


def _list_choices(imported: Any, base_class: type) -> list[str]:
    """Return the public names of a module that derive from the base, or all without such a name."""
    names = [word for word in dir(imported) if not word.startswith("_")]
    suitable = [name for name in names if _derives(vars(imported).get(name), base_class)]
    return suitable or names


def _derives(value: Any, base_class: type) -> bool:
    return isinstance(value, type) and issubclass(value, base_class)


def _read_return_type(function: Any) -> Any:
    """Return the return annotation of a function; None if there is none that can be read."""
    try:
        return typing.get_type_hints(function).get("return")
    except (AttributeError, NameError, SyntaxError, TypeError, ValueError):
        # An annotation of foreign code is text that may name nothing.
        return None


def _describe(value: Any) -> str:
    """Return the type of a value in words for an error message."""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"of type {type(value).__name__}"
