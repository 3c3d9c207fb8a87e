"""Head diversity of a checkpoint, and the terms of a composition of heads."""

import importlib
from pathlib import Path

import pytest
import torch
from helpers.language_models import train_model
from helpers.paths import EXPERIMENTS
from helpers.tables import read_table

from lit_attn.attention.diagnostics import captured_variance
from lit_attn.attention.spec import PRESETS
from lit_attn.schema.plugins import load_parts

load_parts([EXPERIMENTS / "released" / "head_analysis.py"])
heads = importlib.import_module("head_analysis")

TEXT = "An attention layer"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model(tmp_path_factory.mktemp("models"), windows=[4, None])


@pytest.mark.slow
def test_diversity_is_that_of_the_diagnostics(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert heads.main(["diversity", str(model)]) == 0
    rows = read_table(model / "heads" / "head_diversity.csv")
    assert [row["layer"] for row in rows] == ["1", "2"]
    layer = heads.load_model(model).network.trunk.blocks[1].attn.double()
    with torch.no_grad():
        expected = captured_variance(layer)
    assert float(rows[1]["qk"]) == pytest.approx(expected["qk"])
    assert float(rows[1]["ov"]) == pytest.approx(expected["ov"])
    assert "layer,qk,ov" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dcmha-all", "talking-heads"])
def test_terms_add_up_to_the_composition(preset: str, tmp_path: Path) -> None:
    model = heads.load_model(train_model(tmp_path, attention=PRESETS[preset]))
    ids = model.encoder.prompt(TEXT)
    layer = model.network.trunk.blocks[1].attn
    calls = [heads.record_composition(model, ids, 2, place) for place in ("pre", "post")]
    for call in calls:
        terms = heads.break_down(call)
        row = None
        if call.query is not None:
            row = call.query._make(part[:, -1:] for part in call.query)
        output = call.composer.double()(call.a[None, :, None], row, call.key)[0, :, 0]
        torch.testing.assert_close(sum(terms.values()), output, rtol=1e-9, atol=1e-12)
        assert len(call.keys) == len(ids)
        assert layer.num_heads == len(call.a)


def test_a_window_limits_the_keys(model: Path) -> None:
    loaded = heads.load_model(model)
    ids = loaded.encoder.prompt(TEXT)
    call = heads.record_composition(loaded, ids, 1, "post")
    weights = call.a.sum(-1)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    visible_keys = [key for place, key in enumerate(call.keys) if call.a[:, place].abs().max() > 0]
    assert visible_keys == list(range(len(ids) - 4, len(ids)))


def test_tables_of_a_composition(model: Path, tmp_path: Path) -> None:
    arguments = ["--text", TEXT, "--layer", "2", f"--out={tmp_path}"]
    assert heads.main(["composition", str(model), *arguments]) == 0
    rows = read_table(tmp_path / "composition.csv")
    assert len(rows) == 2 * len(TEXT)
    for row in rows:
        total = sum(float(row[name]) for name in heads.TERMS)
        assert float(row["after"]) == pytest.approx(total, abs=1e-4)
    assert [row["token"] for row in rows[::2]] == list(TEXT)
    before = sum(float(row["before"]) for row in rows if row["head"] == "1")
    assert before == pytest.approx(1, abs=1e-4)
    maps = read_table(tmp_path / "maps.csv")
    # Two components of down and up, and a gate, for 2 heads.
    assert len(maps) == (2 + 2 + 1) * 2 * (len(TEXT) + 1)
    assert {row["side"] for row in maps} == {"query", "key"}
    loaded = heads.load_model(model)
    call = heads.record_composition(loaded, loaded.encoder.prompt(TEXT), 2, "post")
    gate = [float(r["value"]) for r in maps if r["part"] == "gate" and r["side"] == "query"]
    assert gate == pytest.approx(call.query.gate[0, -1].tolist(), abs=1e-5)
    for name in ("breakdown", "distributions"):
        assert (tmp_path / f"{name}.png").stat().st_size > 0
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()


def test_the_breakdown_has_the_terms_of_the_chosen_token(model: Path) -> None:
    """A term that is zero has no column, and the default is the token that changes most."""
    loaded = heads.load_model(model)
    names = list(TEXT)
    call = heads.record_composition(loaded, loaded.encoder.prompt(TEXT), 2, "post")
    terms = heads.break_down(call)
    figure = heads.draw_composition(call, terms, names, 3)["breakdown"]
    left = figure.axes[0]
    labels = [label.get_text() for label in left.get_xticklabels()]
    shown = [name for name, values in terms.items() if values.any()]
    assert labels == [*shown, "after"]
    image = torch.tensor(left.images[0].get_array())
    torch.testing.assert_close(image[:, -1], sum(terms.values())[:, 3])
    change = (sum(terms.values()) - terms["before"]).abs().sum(0)
    chosen = heads.draw_composition(call, terms, names, None)["breakdown"].axes[0]
    expected = sum(terms.values())[:, int(change.argmax())]
    torch.testing.assert_close(torch.tensor(chosen.images[0].get_array())[:, -1], expected)


@pytest.mark.slow
def test_wrong_layers_and_places_are_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train_model(tmp_path, attention=PRESETS["standard"])
    for folder, arguments, message in (
        (model, ["--layer", "3", "--text", TEXT], "--layer: 3 is not one of the layers 1 to 2"),
        (model, ["--text", ""], "--text: is empty"),
        (model, ["--text", TEXT, "--key", "99"], "--key: 99 is not one of the tokens 0 to 17"),
        (plain, ["--text", TEXT], "--place: layer 1 has no composition `post`"),
    ):
        assert heads.main(["composition", str(folder), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
