"""Reports whose images are empty, for tests that read tables and pages."""

import pytest

from lit_attn.report.figures import drawing


@pytest.fixture
def no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw all figures, and write an empty image for each.

    Layout and rendering take seven tenths of the time of a report, and read no record.
    """
    monkeypatch.setattr(drawing, "render", lambda _: {"svg": b"<svg></svg>", "png": b""})
