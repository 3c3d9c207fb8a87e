"""Committed records: a report reads them without training."""

import tarfile
from pathlib import Path

from helpers.paths import EXPERIMENTS, ROOT

from lit_attn.config.papers import read_paper
from lit_attn.report.papers_page import write_paper

EVIDENCE = ROOT / "reports" / "evidence" / "paper-attentionx-small"


def test_the_records_of_a_page_have_its_values(tmp_path: Path) -> None:
    with tarfile.open(EVIDENCE / "records.tar.xz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    source = read_paper("attentionx", "embedded", EXPERIMENTS / "papers")
    page = write_paper(source, tmp_path / "runs", tmp_path)
    table = "table-1.csv"
    assert page.with_name(table).read_bytes() == (EVIDENCE / table).read_bytes()
    assert page.with_name("figure-1-panels.svg").is_file()
