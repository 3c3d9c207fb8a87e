"""Figure 3 of DCMHA: losses over training FLOPs, relative improvements, and compute multipliers."""

from pathlib import Path

import pytest
from helpers.fake_cells import result
from helpers.invented_papers import FOLDER, entries

from lit_attn.papers.page import write_paper
from lit_attn.papers.runs import expand_paper
from lit_attn.papers.source import read_paper

FLOPS = {"405M": 1_000_000, "834M": 4_000_000, "1.4B": 16_000_000}
LEADS = {"dcmha-scaling": 1.87, "dcmha-scaling-plus": 1.67}


def write_ladders(runs: Path) -> None:
    """Write results whose loss is 10 (lead C)^-0.1 for C training FLOPs; ++ has 1.2 times C."""
    source = read_paper("dcmha", "", FOLDER)
    for matrix in expand_paper(source, ["figure-3"], runs, seeds=(0, 1)):
        matrix.write_plan()
        plan = matrix.plan()
        for job in matrix.jobs:
            flops = FLOPS[plan.level]
            lead = LEADS[plan.family] if job.variant == "dcformer" else 1.0
            lead *= 1.2 if "plus" in plan.family else 1.0
            metrics = {"val/loss": 10 * (lead * 3 * flops * 4 * 10) ** -0.1}
            numbers = {"flops": flops, "batch_size": 4, "steps": 10}
            invented = result(job.cell, metrics).model_copy(update=numbers)
            invented.write(job.folder / "result.json")


def test_compute_multipliers_stand_beside_the_published_ones(tmp_path: Path) -> None:
    write_ladders(tmp_path)
    cells = entries(tmp_path, "dcmha", "scaling")
    assert cells["DCFormer", "834M compute"].startswith("1.87 ")
    assert cells["DCFormer", "++ 834M compute"].startswith("1.67 ")
    assert cells["Transformer", "834M compute"] == ""
    # A power law needs the other sizes.
    for size in ("405M", "1.4B"):
        for path in tmp_path.glob(f"dcmha-scaling-{size}/transformer/*/result.json"):
            path.unlink()
    cells = entries(tmp_path, "dcmha", "scaling")
    assert cells["DCFormer", "834M compute"] == ""
    assert cells["DCFormer", "++ 834M compute"].startswith("1.67 ")


@pytest.mark.slow
def test_losses_are_drawn_over_compute_with_relative_improvements(tmp_path: Path) -> None:
    write_ladders(tmp_path)
    source = read_paper("dcmha", "", FOLDER)
    page = write_paper(source, tmp_path, tmp_path / "reports")
    drawing = (page.parent / "figure-3-panels.svg").read_text()
    for text in (
        "training FLOPs",
        "Pile validation loss",
        "reduction of the loss (%)",
        "DCFormer++",
    ):
        assert f"<!-- {text} -->" in drawing
    assert "834M -->" not in drawing  # The sizes are points and no lines.
    for lead in (1.87, 1.67, 1.2):
        assert f"{100 * (1 - lead**-0.1):.4g} at 4.8e+08" in drawing
