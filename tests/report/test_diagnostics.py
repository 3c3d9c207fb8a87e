"""Figures and tables of attention diagnostics, from invented records."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.fake_study import report, write_study
from markupsafe import escape

from lit_attn.cells.rows import DiagnosticRow, csv_lines
from lit_attn.report.figures import diagnostics
from lit_attn.report.figures.drawing import pick_evenly
from lit_attn.report.pages.write import FIGURES

ATTENTION = [name for name, entry in FIGURES.items() if "section" in entry]

STEPS = (100, 200, 300)
QUANTITIES = ("norm-mh", "norm-delta", "cos-mh", "cos-delta", "captured-qk", "captured-ov")


def record(cell: Path, seed: int, layers: int = 3, heads: int = 2, n: int = 9) -> None:
    """Record values that identify their place: layer + seed / 10 + step / 1000; pi by its key."""
    rows = []
    arrays = {}
    generator = np.random.default_rng(seed)
    for step in STEPS:
        for layer in range(1, layers + 1):
            at = layer + seed / 10 + step / 1000
            rows += [DiagnosticRow(step, layer, None, name, at) for name in QUANTITIES]
            rows += [
                DiagnosticRow(step, layer, head, f"pi-{r}", [0.25, 0.75][r - 1] + seed / 100)
                for head in range(1, heads + 1)
                for r in (1, 2)
            ]
            arrays[f"rank.{layer}"] = np.full((4, heads), layer + seed, np.int32)
            arrays[f"map.{layer}"] = generator.random((heads, n, n), np.float32)
            arrays[f"keys.{layer}"] = generator.standard_normal((2 * heads, n, 4), np.float32)
            arrays[f"key-weights.{layer}"] = generator.standard_normal((heads, 6, 4), np.float32)
    (cell / "diagnostics.csv").write_text(csv_lines([DiagnosticRow._fields, *rows]))
    np.savez_compressed(cell / "attention.npz", **arrays)


def cells(study: Path, variant: int) -> list[Path]:
    """Return the folders of a variant's cells, by seed."""
    return sorted((study / f"v{variant}").iterdir())


def write_recorded_study(root: Path, seeds: int = 3, **sizes: int) -> Path:
    """Write a study whose three variants have all diagnostics."""
    study = write_study(root / "runs", seeds=seeds)
    for variant in range(3):
        for seed, cell in enumerate(cells(study, variant)):
            record(cell, seed, **sizes)
    return study


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn")
    write_recorded_study(root)
    return report(root)


@pytest.mark.process
def test_every_figure_has_its_numbers_in_a_table(drawn: Path) -> None:
    page = (drawn / "table.html").read_text()
    assert page.count("<h2>Attention layers</h2>") == 1
    for name in ATTENTION:
        assert (drawn / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f'<figure class="{name}">' in page
        assert str(escape(FIGURES[name]["caption"].partition("{")[0])) in page
    values = pd.read_csv(drawn / "diagnostics.csv")
    row = values.query("variant == 'belief' and step == 200 and layer == 2 and name == 'cos-mh'")
    of_seeds = [2.2, 2.3, 2.4]
    assert row[["mean", "sd", "n"]].values.tolist() == [
        pytest.approx([np.mean(of_seeds), np.std(of_seeds, ddof=1), 3])
    ]
    assert len(values) == 3 * 3 * 3 * (6 + 2 * 2)
    ranks = pd.read_csv(drawn / "ranks.csv")
    # Layer 2 of seeds 0 to 2 has ranks 2 to 4, each in 4 samples and 2 heads.
    layer_two = ranks.query("variant == 'standard' and layer == 2")
    assert layer_two[["rank", "matrices"]].values.tolist() == [[2, 8], [3, 8], [4, 8]]


def test_learned_weights_are_in_the_csv_file(drawn: Path) -> None:
    values = pd.read_csv(drawn / "diagnostics.csv")
    weights = values[(values["name"] == "pi-2") & (values["step"] == STEPS[-1])]
    assert len(weights) == 3 * 2 * 3
    assert weights["mean"].tolist() == pytest.approx([0.76] * len(weights))
    assert weights["sd"].tolist() == pytest.approx([0.01] * len(weights))


@pytest.mark.usefixtures("no_rendering")
def test_a_study_with_learned_weights_alone_has_no_figure_of_attention(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=1)
    rows = [DiagnosticRow(300, 1, None, f"pi-{r}", r / 10) for r in (1, 2, 3)]
    for cell in cells(study, 1):
        (cell / "diagnostics.csv").write_text(csv_lines([DiagnosticRow._fields, *rows]))
    folder = report(tmp_path)
    assert pd.read_csv(folder / "diagnostics.csv")["mean"].tolist() == [0.1, 0.2, 0.3]
    assert not any((folder / f"{name}.svg").exists() for name in ATTENTION)


@pytest.mark.process
def test_the_same_records_give_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    shutil.copytree(drawn.parents[1] / "runs", tmp_path / "runs")
    folder = report(tmp_path)
    for name in [f"{name}.{kind}" for name in ATTENTION for kind in ("svg", "png")]:
        assert (folder / name).read_bytes() == (drawn / name).read_bytes(), name
    for name in ("diagnostics.csv", "ranks.csv", "table.html"):
        assert (folder / name).read_bytes() == (drawn / name).read_bytes(), name


@pytest.mark.usefixtures("no_rendering")
def test_files_of_an_earlier_report_are_removed(drawn: Path, tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=3)
    shutil.copytree(drawn.parent, tmp_path / "reports")
    folder = report(tmp_path)
    remaining = {path.stem for path in folder.iterdir()}
    assert not remaining & {*ATTENTION, "diagnostics"}
    assert "Attention layers" not in (folder / "table.html").read_text()
    assert (folder / "progress.svg").exists()


@pytest.mark.process
def test_variants_can_lack_some_diagnostics(tmp_path: Path) -> None:
    """One variant has no attention matrices, one has one seed, and one has no diagnostics.

    The first one also has a failed cell and torn lines, which are left out.
    """
    study = write_recorded_study(tmp_path)
    for cell in cells(study, 0):
        (cell / "attention.npz").unlink()
    with (cells(study, 0)[0] / "diagnostics.csv").open("a") as stream:
        stream.write("400,1,,norm-m\n400,1,,norm-mh,0.")
    (cells(study, 0)[2] / "result.json").unlink()
    for path in [*cells(study, 1)[1:], *cells(study, 2)]:
        for name in ("attention.npz", "diagnostics.csv"):
            (path / name).unlink()
    folder = report(tmp_path)
    assert set(pd.read_csv(folder / "ranks.csv")["variant"]) == {"belief"}
    recorded = pd.read_csv(folder / "diagnostics.csv")
    assert recorded["step"].max() == 300
    counts = recorded.groupby("variant")["n"].unique()
    assert {name: list(n) for name, n in counts.items()} == {"standard": [2], "belief": [1]}
    assert all((folder / f"{name}.svg").exists() for name in ATTENTION)


@pytest.mark.process
def test_many_layers_and_heads_are_drawn(tmp_path: Path) -> None:
    """Figures of a deep network with long sequences show a selection of layers and heads."""
    write_recorded_study(tmp_path, seeds=1, layers=24, heads=16, n=64)
    folder = report(tmp_path)
    assert all((folder / f"{name}.png").exists() for name in ATTENTION)
    assert set(pd.read_csv(folder / "ranks.csv")["layer"]) == set(range(1, 25))


@pytest.mark.parametrize(
    ("count", "most", "expected"), [(3, 4, [1, 2, 3]), (24, 4, [1, 9, 16, 24]), (12, 3, [1, 7, 12])]
)
def test_layers_are_picked_evenly(count: int, most: int, expected: list[int]) -> None:
    assert pick_evenly(list(range(1, count + 1)), most) == expected


@pytest.mark.process
def test_names_are_escaped(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", variants={"<b>$x$</b>": 0.0, "b": 0.1}, seeds=1)
    for variant in range(2):
        record(cells(study, variant)[0], 0)
    folder = report(tmp_path)
    page = (folder / "table.html").read_text()
    assert '<th scope="row">&lt;b&gt;$x$&lt;/b&gt;</th>' in page
    assert not re.search("<b>", page)


@pytest.mark.process
def test_figures_need_no_torch(tmp_path: Path) -> None:
    write_recorded_study(tmp_path, seeds=1)
    code = (
        "import sys; from pathlib import Path; from lit_attn.report import write_reports\n"
        "write_reports(Path(sys.argv[1]), Path(sys.argv[2])); assert 'torch' not in sys.modules"
    )
    places = [str(tmp_path / "runs"), str(tmp_path / "reports")]
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reports" / "fake" / "norms.svg").exists()


@pytest.mark.parametrize(("others", "is_drawn"), [(0, False), (2, False), (3, True)])
def test_ranks_of_which_one_percent_differ_need_no_figure(others: int, is_drawn: bool) -> None:
    ranks = np.full((100, 2), 17)
    ranks[:others, 0] = 16
    recorded = diagnostics.Diagnostics(pd.DataFrame(), {"standard": [{"rank.1": ranks}]})
    assert (diagnostics.DRAWERS["ranks"](recorded, "standard") is not None) == is_drawn


@pytest.mark.parametrize("kind", ["norm", "cos"])
def test_the_first_token_has_drawings_of_its_own_values(kind: str) -> None:
    rows = []
    for step in STEPS:
        rows.append(("belief", step, 1, None, f"{kind}-mh", 2.0))
        rows.append(("belief", step, 1, None, f"{kind}-mh@1", step / 1000))
        rows.append(("belief", step, 1, None, f"{kind}-delta@1", step / 2000))
    values = pd.DataFrame(rows, columns=["variant", *DiagnosticRow._fields])
    recorded = diagnostics.Diagnostics(values, {})
    name = {"norm": "first-norms", "cos": "first-angles"}[kind]
    figure = diagnostics.PAPER_DRAWERS[name](recorded, "belief")
    assert figure is not None
    curves = {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    expected = {tuple(step / scale for step in STEPS) for scale in (1000, 2000)}
    assert expected <= curves
    only_means = recorded._replace(values=values[values["name"] == f"{kind}-mh"])
    assert diagnostics.PAPER_DRAWERS[name](only_means, "belief") is None
