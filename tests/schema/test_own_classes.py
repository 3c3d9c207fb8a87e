"""Classes that a configuration names: the names that a message offers."""

import math
import sys
import types

import pytest

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.own_classes import import_class


def test_a_missing_class_is_told_with_the_names_that_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("mine")
    module.math = math  # type: ignore[attr-defined]
    module.helper = lambda: None  # type: ignore[attr-defined]
    module.Ours = type("Ours", (ArithmeticError,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    with pytest.raises(ConfigError) as caught:
        import_class("mine:Zzz", "builtins:ArithmeticError")
    assert str(caught.value) == "import: module 'mine' has no 'Zzz'; choose from Ours"
    # Without a name that would do, all names are offered.
    with pytest.raises(ConfigError, match="choose from Ours, helper, math"):
        import_class("mine:Zzz", "builtins:ImportError")
