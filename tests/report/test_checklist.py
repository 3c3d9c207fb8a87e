"""`report --checklist`: answers from the records, and marks for what they do not know."""

from pathlib import Path

import pytest
from helpers.answers import read_answer
from helpers.fake_study import write_study

from lit_attn.cells.records import Tuning
from lit_attn.config.metrics import DEFAULT_METRIC
from lit_attn.report.__main__ import main
from lit_attn.report.checklist import CHECKLISTS, FACTS, make_checklist
from lit_attn.report.read import read_studies


def write(root: Path, **study: object) -> str:
    """Return the checklist about a study."""
    write_study(root / "runs", **study)
    return make_checklist("neurips", list(read_studies(root / "runs")))


def section(text: str, title: str) -> str:
    """Return the lines below a heading."""
    return text.partition(f". {title}\n")[2].partition("\n## ")[0]


def test_the_records_answer_what_they_know(tmp_path: Path) -> None:
    failures = {("belief", 0): "diverged"}
    text = write(tmp_path, seeds=6, failures=failures)
    significance = section(text, "Experiment statistical significance")
    assert "sample standard deviation over 6 seeds" in significance
    assert "corrected for 2 comparisons" in significance
    assert "17 of 18 cells have a result, 1 failed and 0 are missing" in significance
    assert "To do" not in significance
    compute = section(text, "Experiments compute resources")
    # 17 cells of 61.5 seconds.
    assert "17 cells took 0.29 hours on CPU" in compute
    assert "The largest memory was 0.81 GB" in compute
    assert "da7a" in section(text, "Open access to data and code")
    details = section(text, "Experimental setting and details")
    assert "800 steps" in details
    assert "No hyperparameter was tuned" in details
    assert "**To do:**" in section(text, "Licenses for existing assets")


def test_the_budget_of_the_tuning_is_stated(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "runs")
    tuning = {
        "sampler": "grid",
        "trials": 4,
        "seeds": [1000, 1001],
        "select": DEFAULT_METRIC,
        "keys": {"optimizer.lr": [1, 2, 3, 4]},
        "variants": [],
    }
    Tuning.model_validate(tuning).write(folder / "tuning.json")
    (study,) = read_studies(tmp_path / "runs")
    text = section(make_checklist("neurips", [study]), "Experimental setting and details")
    assert "optimizer.lr of every variant" in text
    assert "4 trials (grid)" in text
    assert "seeds 1000, 1001" in text


def test_every_fact_of_a_checklist_has_a_function() -> None:
    for checklist in CHECKLISTS.values():
        assert len({item["title"] for item in checklist["items"]}) == len(checklist["items"])
        for item in checklist["items"]:
            assert set(item.get("facts", [])) <= FACTS.keys()
            assert item.get("facts") or item.get("left")


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(tmp_path / "runs", seeds=2)
    reports = tmp_path / "reports"
    words = [str(tmp_path / "runs"), "--reports", str(reports)]
    assert main([*words, "--checklist", "neurips"]) == 0
    assert (reports / "checklist-neurips.md").is_file()
    assert main([*words, "--checklist", "neurips", "--json"]) == 0
    *_, answer = capsys.readouterr().out.partition("\n")
    assert read_answer(answer)["reports"][0]["name"] == "checklist-neurips"
    assert main([*words, "--checklist", "neurip"]) == 2
    assert "no checklist 'neurip'; did you mean 'neurips'?" in capsys.readouterr().err
    assert main([*words, "--checklist", "neurips", "--across", "fake"]) == 2
