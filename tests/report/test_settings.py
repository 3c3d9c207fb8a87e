"""The settings that a variant changes are listed beside its results."""

import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import write_study

from lit_attn.report import write_reports

pytestmark = pytest.mark.usefixtures("no_rendering")

CONFIG = """
study: fake
seed: {seed}
experiment:
  optimizer: {{kind: adamw, lr: {lr}}}
  model: {{ffn: {{width: 96}}, attention: {attention}}}
  data: {{augment: [flip, {{kind: crop}}]}}
"""


def configure(study: Path, variant: int, lr: str, attention: str = "{residual: full}") -> None:
    for seed, cell in enumerate(sorted(study.glob(f"v{variant}/*"))):
        text = CONFIG.format(seed=seed, lr=lr, attention=attention)
        (cell / "config.yaml").write_text(text)


def test_every_differing_setting_is_listed(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    configure(study, 0, "0.001")
    configure(study, 1, "0.002")
    configure(study, 2, "0.001", "{residual: split, activation: silu}")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    settings = pd.read_csv(folder / "settings.csv")
    assert settings.values.tolist() == [
        ["belief", "optimizer.lr", "0.001", "0.002"],
        ["belief2", "model.attention.residual", "full", "split"],
        ["belief2", "model.attention.activation", "\N{EM DASH}", "silu"],
    ]
    page = (folder / "table.html").read_text()
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.002</td>" in page
    assert "value of standard" in page


def test_settings_and_link_are_those_of_the_first_recorded_configuration(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    configure(study, 0, "0.001")
    configure(study, 1, "0.002")
    (study / "v1" / "0-0100000000" / "config.yaml").unlink()
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert pd.read_csv(folder / "settings.csv")["variant"].tolist() == ["belief"]
    links = re.findall('href="(.*?config.yaml)"', (folder / "table.html").read_text())
    # The third variant has not recorded any configuration.
    assert [Path(link).parts[-3:-1] for link in links] == [
        ("v0", "0-0000000000"),
        ("v1", "1-0100000001"),
    ]
    assert all((folder / link).exists() for link in links)


def test_variants_without_a_configuration_have_no_settings(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    configure(study, 0, "0.001")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert not (folder / "settings.csv").exists()


def test_a_damaged_configuration_is_told_and_the_next_one_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = write_study(tmp_path / "runs", seeds=2)
    for variant in range(3):
        configure(study, variant, f"0.00{variant + 1}")
    first = next(study.glob("v2/0-*")) / "config.yaml"
    first.write_text("{")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert pd.read_csv(folder / "settings.csv")["variant"].tolist() == ["belief", "belief2"]
    (warning,) = caplog.messages
    assert f"{first}: unreadable and skipped" in warning


@pytest.mark.parametrize("content", ["{", "", "- 1", "experiment: 5", "experiment: {1: {2: 3}}"])
def test_unknown_settings_stand_in_the_table_and_on_the_page(tmp_path: Path, content: str) -> None:
    study = write_study(tmp_path / "runs", seeds=1)
    for variant in range(3):
        configure(study, variant, f"0.00{variant + 1}")
    for cell in study.glob("v2/*"):
        (cell / "config.yaml").write_text(content)
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    rows = pd.read_csv(folder / "settings.csv").values.tolist()
    assert rows[0] == ["belief", "optimizer.lr", "0.001", "0.002"]
    page = (folder / "table.html").read_text()
    if content.startswith("experiment: {"):
        # Another experiment is readable, and differs in every setting.
        assert len(rows) > 2
        return
    assert rows[1:] == [["belief2", "config.yaml", "\N{EM DASH}", "cannot be read"]]
    assert "Warning: No config.yaml of belief2 can be read" in page


def test_damaged_settings_of_the_baseline_keep_the_file(tmp_path: Path) -> None:
    study = write_study(tmp_path / "runs", seeds=1)
    for variant in range(3):
        configure(study, variant, f"0.00{variant + 1}")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    for cell in study.glob("v0/*"):
        (cell / "config.yaml").write_text("{")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    settings = pd.read_csv(folder / "settings.csv")
    assert settings.values.tolist() == [
        ["standard", "config.yaml", "\N{EM DASH}", "cannot be read"]
    ]
