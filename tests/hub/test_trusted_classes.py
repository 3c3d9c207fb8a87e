"""Classes that a study names: only those of the documented kind are accepted."""

import sys
import types
from pathlib import Path

import pytest
import torch
import torchmetrics

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.own_classes import import_class
from lit_attn.schema.plugins import load_parts

BASES = ("torch.nn:Module", "lightning:LightningModule", "torchmetrics:Metric")


@pytest.mark.parametrize("base", BASES)
def test_only_a_class_of_the_documented_kind_is_accepted(base: str) -> None:
    for target in (
        "os:system",
        "builtins:exec",
        "torch.hub:load",
        "functools:partial",
        "lit_attn.schema.base:Config",
        "torch:Tensor",
        "sys:modules",
    ):
        with pytest.raises(ConfigError, match=f"import: {target} is not a subclass of "):
            import_class(target, base, takes_functions=True)


def test_a_name_that_is_no_class_is_one_line() -> None:
    for target in ("", ":", ":Net", "os", "os:", ".os:system", "os..path:join", "..:x"):
        with pytest.raises(ConfigError, match=r"^import: "):
            import_class(target, BASES[0])


def test_a_function_counts_if_it_declares_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def declared(classes: int) -> torch.nn.Linear:
        called.append(classes)
        return torch.nn.Linear(2, classes)

    def undeclared(classes: int):  # type: ignore[no-untyped-def]
        called.append(classes)

    def wrong(classes: int) -> "Nothing":  # type: ignore[name-defined]  # noqa: F821
        called.append(classes)

    def metric() -> torchmetrics.Metric:
        return torchmetrics.MeanMetric()

    module = types.ModuleType("mine")
    vars(module).update(declared=declared, undeclared=undeclared, wrong=wrong, metric=metric)
    monkeypatch.setitem(sys.modules, "mine", module)
    assert import_class("mine:declared", BASES[0], takes_functions=True) is declared
    for name in ("undeclared", "wrong"):
        with pytest.raises(ConfigError, match=r"is not a subclass of torch\.nn\.Module"):
            import_class(f"mine:{name}", BASES[0], takes_functions=True)
    with pytest.raises(ConfigError, match=r"is not a subclass of torchmetrics\.Metric"):
        import_class("mine:metric", BASES[2])
    assert not called
    assert import_class("torchvision.models:resnet18", BASES[0], takes_functions=True)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('broken')", "broken_net.py:1: RuntimeError: broken"),
        ("raise SystemExit(3)", "broken_net.py:1: calls sys.exit when imported"),
        ("def __getattr__(name): raise KeyError(name)", "module 'broken_net' has no 'Net'"),
        ("import nothing_like_it", "import: broken_net:Net: No module named 'nothing_like_it'"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every command does so before it reads a configuration; a failure then has file and line.
    load_parts([])
    (tmp_path / "broken_net.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for base in BASES:
        with pytest.raises(ConfigError) as caught:
            import_class("broken_net:Net", base)
        assert message in str(caught.value)
        sys.modules.pop("broken_net", None)
