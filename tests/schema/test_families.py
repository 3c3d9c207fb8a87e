"""Strict configurations and families: kinds, identities and error messages of one line."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from lit_attn.attention.spec import PRESETS
from lit_attn.config.training import Training
from lit_attn.data.augment.steps import CropConfig, FlipConfig, NormalizeConfig
from lit_attn.data.base import Data
from lit_attn.data.image_sets import Cifar10, Digits
from lit_attn.optim.base import Optimizer
from lit_attn.optim.standard import AdamW
from lit_attn.schema.base import Config, Kind, outside_identity
from lit_attn.schema.errors import ConfigError, explain, suggest


class Shape(Kind):
    """Family for these tests."""


class Circle(Shape, kind="circle"):
    radius: float = 1.0
    colour: Literal["red", "green"] = "red"


class Drawing(Config):
    shape: Shape = Circle()
    layers: tuple[Shape, ...] = ()
    file: Path = outside_identity(Path("here"), "location of the file")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("circle", Circle()),
        ({"kind": "circle", "radius": 2}, Circle(radius=2)),
        (Circle(radius=3), Circle(radius=3)),
    ],
)
def test_a_kind_is_given_by_name_mapping_or_instance(value: object, expected: Circle) -> None:
    assert Drawing.model_validate({"shape": value}).shape == expected


def explain_mistake(**values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(values)
    return str(explain(caught.value, "a.yaml"))


def test_every_mistake_is_one_line() -> None:
    assert explain_mistake(shap=1) == "a.yaml: shap: unknown key 'shap'; did you mean 'shape'?"
    assert explain_mistake(shape="circl") == (
        "a.yaml: shape: 'circl' is not a known shape; did you mean 'circle'?"
    )
    assert explain_mistake(shape={"radius": 1}) == "a.yaml: shape: needs a kind; choose from circle"
    assert explain_mistake(shape=3) == "a.yaml: shape: needs a kind; choose from circle"
    assert explain_mistake(layers=["circle", {"kind": "circle", "radus": 1}]) == (
        "a.yaml: layers.1.radus: unknown key 'radus'; did you mean 'radius'?"
    )
    assert explain_mistake(shape={"kind": "circle", "colour": "reed"}) == (
        "a.yaml: shape.colour: 'reed' is not a choice; did you mean 'red'?"
    )
    assert explain_mistake(shape={"kind": "circle", "radius": float("inf")}) == (
        "a.yaml: shape.radius: input should be a finite number, not inf"
    )
    assert explain_mistake(shape={"kind": "circle", "radius": True}) == (
        "a.yaml: shape.radius: needs a number, not true or false"
    )
    long = explain_mistake(shape={"kind": "circle", "radius": "9" * 999 + "x"})
    assert "\n" not in long
    assert len(long) < 200


class Filled(Config):
    """Configuration with a value that is a truth value, a number or a name."""

    pattern: bool | float | Literal["dots", "lines"] = False


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("dot", "a.yaml: pattern: 'dot' is not a choice; did you mean 'dots'?"),
        ([], "a.yaml: pattern: write true or false, not []"),
    ],
)
def test_a_text_for_a_name_or_something_else_was_meant_as_the_name(
    pattern: object, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Filled.model_validate({"pattern": pattern})
    assert str(explain(caught.value, "a.yaml")) == message


def test_a_message_with_a_line_separator_is_one_line() -> None:
    assert str(ConfigError("metric: 'test/a\u2028b' is\nnot measured")) == (
        "metric: 'test/a b' is not measured"
    )


def test_an_identity_contains_the_values_that_differ_from_the_defaults() -> None:
    assert Drawing().identity() == {}
    assert Drawing(shape=Circle(), file=Path("elsewhere")).identity() == {}
    assert Drawing(shape=Circle(radius=2)).identity() == {"shape": {"kind": "circle", "radius": 2}}
    assert Drawing(layers=(Circle(),)).identity() == {"layers": [{"kind": "circle"}]}


def test_a_computed_identity_leaves_equality_and_hash_alone() -> None:
    """Equality, hashing and dumps ignore the cached identity."""
    with_identity, other = Circle(radius=2), Circle(radius=2)
    with_identity.identity()
    assert with_identity == other
    assert hash(with_identity) == hash(other)
    assert with_identity.model_dump() == other.model_dump()
    assert with_identity.model_copy(update={"radius": 3.0}) == Circle(radius=3)


def test_a_configuration_never_changes() -> None:
    with pytest.raises(ValidationError):
        Digits().batch_size = 3


def test_paths_of_data_are_outside_identity() -> None:
    assert Cifar10(root=Path("a")).identity() == Cifar10(root=Path("b")).identity()
    flipped, cropped = ((step, NormalizeConfig()) for step in (FlipConfig(), CropConfig()))
    assert Digits(augment=flipped).identity() != Digits(augment=cropped).identity()


def test_suggest_names_the_nearest_choice() -> None:
    assert suggest("heds", ["heads", "depth"]) == "; did you mean 'heads'?"
    assert suggest("mkg", ["mlk", "mgk"]) == "; did you mean 'mgk'?"
    assert suggest("zzz", ["heads", "depth"]) == "; choose from heads, depth"
    assert suggest("zzz", []) == ""


def test_families_have_separate_members() -> None:
    assert set(Optimizer.family) >= {"adam", "adamw", "sgd"}
    assert Optimizer.parse({"kind": "adamw", "lr": 1e-3}) == AdamW(lr=1e-3)
    assert not set(Optimizer.family) & set(Data.family)


class Filter(Kind):
    """Family with a default kind."""

    default_kind = "low-pass"


class LowPass(Filter, kind="low-pass"):
    cutoff: float = 1.0


class HighPass(Filter, kind="high-pass"):
    cutoff: float = 1.0


class BandPass(Filter):
    kind: Literal["band-pass"] = "band-pass"


def test_the_kind_of_a_member_is_fixed_also_if_the_body_of_the_class_names_it() -> None:
    assert Filter.parse("band-pass") == BandPass()
    assert Filter.family == {"low-pass": LowPass, "high-pass": HighPass, "band-pass": BandPass}
    for member in Filter.family.values():
        with pytest.raises(ValidationError, match="Input should be"):
            member.model_validate({"kind": "another"})


def test_a_default_kind_can_be_left_out_and_is_not_part_of_the_identity() -> None:
    assert Filter.parse({"cutoff": 2}) == LowPass(cutoff=2)
    assert LowPass(cutoff=2).identity() == {"cutoff": 2}
    assert HighPass().identity() == {"kind": "high-pass"}


def test_a_copy_with_other_values_has_an_identity_of_its_own() -> None:
    training = Training(epochs=2)
    assert training.identity() == {"epochs": 2}
    assert training.model_copy(update={"stretch": 1.5}).identity() == {"epochs": 2, "stretch": 1.5}


def test_a_cached_property_is_no_key_of_a_configuration() -> None:
    """Parts of a preset are copied by `dict(preset)`, also after questions about it."""
    preset = PRESETS["belief2"].model_copy()
    assert not preset.needs_foreign_code
    assert dict(preset).keys() == type(preset).model_fields.keys()
