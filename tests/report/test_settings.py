"""The settings that a variant changes are listed beside its results."""

import re
from pathlib import Path

import pandas as pd
from helpers.fake_study import write_study

from lit_attn.report import write_reports

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
    for cell in study.glob("v1/*"):
        (cell / "config.yaml").write_text("{torn")
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert not (folder / "settings.csv").exists()


def test_the_ffn_width_is_a_column(tmp_path: Path) -> None:
    write_study(tmp_path / "runs", seeds=2)
    (folder,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    assert "| FFN width |" in (folder / "table.full.md").read_text()
    assert set(pd.read_csv(folder / "table.csv")["ffn_width"]) == {384}
