"""Output of a run: estimated time left, plain lines, and the live table at every width."""

import builtins
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lit_attn.ablate.display import (
    BAR_WIDTH,
    Display,
    LiveDisplay,
    Snapshot,
    StartedCell,
    draw_bar,
    format_seconds,
    make_display,
    open_notebook_display,
    render_table,
    write_line,
)
from lit_attn.cells.folder import Progress
from lit_attn.schema.errors import ConfigError

WAITING = "tiny/c/0"
RUNNING = [
    StartedCell("tiny/a/0", Progress(step=1, total=2, step_time=5.0), 5.0),
    StartedCell("tiny/b/0", None, 5.0),
]


def estimate_time_left(
    finished: list[tuple[str, float]], started: list[StartedCell], waiting: list[str], at_once: int
) -> float | None:
    return Snapshot(0, 0, waiting, started, finished, at_once).remaining_seconds()


def snapshot(**changes: object) -> Snapshot:
    values = {"done": 0, "failed": 0, "waiting": [WAITING] * 4, "running": RUNNING}
    values |= {"durations": [], "slots": 2}
    return Snapshot(**values | changes)  # type: ignore[arg-type]


def test_there_is_no_estimate_before_a_cell_has_made_a_tenth_of_its_steps() -> None:
    assert estimate_time_left([], [], [WAITING] * 3, 2) is None
    # After ten seconds, most of them for the imports and for the slow first step.
    early = [
        StartedCell("tiny/a/0", Progress(step=9, total=100, step_time=0.5), 10.0),
        StartedCell("tiny/b/0", Progress(step=50, total=100), 10.0),
    ]
    assert estimate_time_left([], early, [WAITING] * 3, 2) is None
    summary = snapshot(waiting=[WAITING] * 3, running=early).summary()
    assert summary == "0 done, 2 running, 3 waiting"


def test_steps_of_running_cells_predict_the_time_left() -> None:
    # Ten seconds per cell: four cells wait, two cells are half done, two run at once.
    assert estimate_time_left([], RUNNING, [WAITING] * 4, 2) == 25.0


def test_finished_cells_predict_the_time_left_of_their_variant_and_study() -> None:
    finished = [("long/a/0", 100.0), ("short/a/0", 1.0), ("short/b/0", 2.0), ("short/b/1", 4.0)]

    def predict_time_left(*waiting: str) -> float | None:
        return estimate_time_left(finished, [], list(waiting), 1)

    assert predict_time_left("short/a/1") == 1.0
    assert predict_time_left("short/b/2", "long/a/1") == 103.0
    # No cell of the variant has finished: the mean of its study counts, or else of all cells.
    assert predict_time_left("short/c/0") == pytest.approx(7 / 3)
    assert predict_time_left("other/a/0") == pytest.approx(107 / 4)
    summary = snapshot(done=1, waiting=[], durations=[("tiny/a/0", 6.0), ("tiny/b/1", 6.0)])
    assert summary.summary() == "1 done, 2 running, 0 waiting, about 0:03 left"


def test_seconds_are_written_as_minutes_and_hours() -> None:
    assert (format_seconds(59.6), format_seconds(3725)) == ("1:00", "1:02:05")


def test_simultaneous_events_share_one_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_display(sys.stdout), Display)
    display = Display(sys.stdout)
    state = snapshot(done=2, failed=1, waiting=[WAITING], running=[], slots=1)
    display.add_event("done a")
    display.add_event("done b")
    display.update(state)
    display.update(state)
    display.close()
    assert capsys.readouterr().out == "done a\ndone b  [2 done, 0 running, 1 failed, 1 waiting]\n"


def test_an_event_during_the_output_is_not_lost() -> None:
    """A signal handler may report an event while a line is written."""
    display = Display(sys.stdout)

    class Interrupted(io.StringIO):
        def flush(self) -> None:
            if "first" in self.getvalue() and "second" not in self.getvalue():
                display.add_event("second")

    display.stream = stream = Interrupted()
    display.add_event("first")
    display.close()
    display.close()
    assert stream.getvalue() == "first\nsecond\n"


def test_escape_sequences_become_visible() -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.add_event("FAILED  \x1b[2Jerror: \x9b31m\r\ttext")
    display.close()
    assert stream.getvalue() == "FAILED  \\x1b[2Jerror: \\x9b31m\\x0d\ttext\n"
    # A table has the device and the versions of results, which may be downloaded.
    write_line("| device \x1b]0;title\x07 |", stream)
    assert stream.getvalue().endswith("| device \\x1b]0;title\\x07 |\n")
    assert str(ConfigError("plan.json: unknown \x1b[2J")) == "plan.json: unknown \\x1b[2J"
    # Nobody sees these in a message: a byte-order mark and a no-break space.
    assert str(ConfigError("no column '\ufeffa\xa0é'")) == "no column '\\ufeffa\\xa0é'"


def render(state: Snapshot, width: int) -> list[str]:
    screen = io.StringIO()
    console = Console(file=screen, width=width, color_system=None)
    console.print(render_table(state))
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_the_table_shows_names_times_and_steps_at_every_width(width: int) -> None:
    name = "digits@training.max_steps=2000/residual=perpendicular,zz=with/12"
    running = [
        StartedCell(name, Progress(step=12_345, total=100_000, step_time=0.1), 4000.0),
        StartedCell("tiny/b/0", None, 5.0),
    ]
    lines = render(snapshot(running=running), width)
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).startswith("0 done, 2 running, 4 waiting, about")
    head = next(i for i, line in enumerate(lines) if line.split() == ["cell", "time", "steps"])
    first, *rest, last = lines[head + 1 :]
    assert first.split()[1:] == ["1:06:40", "12345/100000"]
    # A name that is too long for the terminal takes several lines.
    assert "".join(line.split()[0] for line in (first, *rest)) == name
    assert bool(rest) == (width < 100)
    assert last.split() == ["tiny/b/0", "0:05", "starting"]


def test_a_bar_shows_the_share_of_the_work() -> None:
    assert draw_bar(0.0) == f"[{'-' * BAR_WIDTH}] 0%"
    assert draw_bar(0.5) == f"[{'#' * 20}{'-' * 20}] 50%"
    assert draw_bar(1.0) == f"[{'#' * BAR_WIDTH}] 100%"


def test_a_notebook_shows_the_present_text_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown[-1] = data["text/plain"]

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Handle()

    class ZMQInteractiveShell:
        """Class of a notebook's shell, which Rich recognizes by its name."""

    ipython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(ipython, "display", display)
    texts = iter(["1 done", "2 done"])
    open_notebook_display()(lambda: next(texts))
    assert shown == []
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    show = open_notebook_display()
    assert shown == ["starting"]
    show(lambda: next(texts))
    assert shown == ["1 done"]
    show(lambda: next(texts))
    assert shown == ["2 done"]


def test_more_cells_than_lines_leave_the_counts() -> None:
    running = [StartedCell(f"tiny/a/{seed}", None, 1.0) for seed in range(50)]
    assert render(snapshot(running=running), 80)[0].startswith("0 done, 50 running")


def test_without_running_cells_there_are_only_the_counts() -> None:
    assert render(snapshot(running=[]), 80) == ["0 done, 0 running, 4 waiting"]


def test_the_live_table_takes_names_literally() -> None:
    running = [StartedCell("tiny/residual=[red]/0", Progress(step=1, total=2, step_time=5.0), 5.0)]
    assert "tiny/residual=[red]/0" in render(snapshot(running=running), 100)[2]
    live = LiveDisplay()
    live.add_event("FAILED [x]")
    live.update(snapshot())
    live.close()


def test_a_line_for_a_full_disk_is_not_written_again_at_the_end() -> None:
    """Python flushes its streams when it ends, and its exit code would be 120."""
    with Path("/dev/full").open("w") as stream:
        write_line("a line", stream)
