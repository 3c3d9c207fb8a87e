"""The runner's benchmark measures what it says."""

import pytest

from lit_attn.bench.__main__ import main


def test_bench_runner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runner", "--cells", "3", "--jobs", "2", "--expand", "9", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "read and expand 9 cells",
        "look at 9 cells",
        "start the server and run 1 cell",
        "run 3 cells, 2 at once",
        "the same, per cell",
    ]
    for line in lines[2:]:
        median, least, most = (float(cell.replace(",", "")) for cell in line.split("|")[2:5])
        assert 0 < least <= median <= most
