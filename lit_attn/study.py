"""Python interface of a study: read or build it, run it, and read its results as data frames.

It is the same study that the command line runs: both read and write the same files.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lit_attn.ablate.display import draw_bar, open_notebook_display
from lit_attn.ablate.plan import Matrix, expand
from lit_attn.ablate.status import describe, measure_share, read_cells
from lit_attn.cells.folder import count_states, read_result
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.records import Plan
from lit_attn.config.cell import Cell
from lit_attn.config.study import read_studies
from lit_attn.files import write_atomic
from lit_attn.report import write_reports
from lit_attn.report.tables.formats import read_csv
from lit_attn.schema.errors import ConfigError, plural, require
from lit_attn.schema.yaml_text import format_yaml

if TYPE_CHECKING:
    import pandas as pd

COSTS = (
    "parameters",
    "flops",
    "ffn_width",
    "cache_bytes",
    "step_time",
    "evaluation_time",
    "peak_memory",
    "wall_time",
    "device",
    "steps",
    "epochs",
    "selected_epoch",
    "code",
    "data",
)
"""Columns of `results` from the record of a cell; times are in seconds, memory is in bytes."""

WRITTEN = "# Written by lit_attn.Study, which replaces this file."


class Study:
    """A study of a file of studies, or one that is built in Python.

    `experiment` is a file or a mapping; `keys` are the other keys of a study (docs/studies.md):

        Study("sizes", experiment="experiments/digits.yaml", seeds=2, baseline="standard",
              cells={"standard": {}, "xsa": {"attention": "xsa"}})

    The study is written to `folder`/NAME.yaml, and paths in it are relative to `folder`. `out` and
    `reports` are the folders of results and of tables. Raises ConfigError for a mistake.
    """

    def __init__(
        self,
        name: str,
        *,
        experiment: "str | Path | dict[str, Any]",
        folder: str | Path = ".",
        out: str | Path = "runs",
        reports: str | Path = "reports",
        **keys: Any,
    ) -> None:
        if "compare_within" in keys:
            raise ConfigError(
                "Study: compare_within: makes several studies; write a file, and read each of them"
                " with from_yaml"
            )
        path = Path(folder) / f"{name}.yaml"
        # Contents of the files, which are written when the study has no mistake.
        texts: dict[Path, str] = {}
        if isinstance(experiment, dict):
            written = path.with_suffix(".experiment.yaml")
            texts[written] = _to_yaml(written, experiment)
            experiment = written.name
        study = {"title": name, "experiment": str(experiment), **keys}
        texts[path] = _to_yaml(path, {"studies": {name: study}})
        self.path = path
        self.name = name
        self.out = Path(out)
        self.reports = Path(reports)
        try:
            self._expand(texts)
        except ConfigError as error:
            # The files do not exist yet, so their names and lines would explain nothing.
            places = "|".join(re.escape(str(file)) for file in texts)
            message = re.sub(rf"^(?:{places})(:\d+)?: ", "Study: ", str(error))
            raise ConfigError(message) from error
        for file, content in texts.items():
            write_atomic(file, content)

    @classmethod
    def from_yaml(
        cls,
        path: str | Path = "ablations.yaml",
        name: str | None = None,
        *,
        out: str | Path = "runs",
        reports: str | Path = "reports",
    ) -> Self:
        """Return the study `name` of a file; without a name its only (default) study."""
        studies = read_studies(Path(path))
        names = [source.name for source in studies.values() if source.study.default]
        if not names:
            names = list(studies)
        if name is None and len(names) > 1:
            raise ConfigError(f"{path}: choose one with the argument `name`: {', '.join(names)}")
        study = cls.__new__(cls)
        study.path = Path(path)
        study.name = name or names[0]
        study.out = Path(out)
        study.reports = Path(reports)
        study._expand()
        return study

    def __repr__(self) -> str:
        matrix = self._expand()
        jobs = matrix.early_jobs + matrix.jobs
        states = count_states(job.state() for job in jobs)
        variants = plural(len(matrix.written), "variant")
        seeds = plural(len(matrix.seeds), "seed")
        if matrix.screening is not None:
            screened = plural(matrix.screening.screen, "seed")
            seeds = f"{screened}, the best {matrix.screening.keep} and the baseline x {seeds}"
        return f"Study({self.name!r}: {variants} x {seeds}; {states})"

    def expand(self) -> list[Cell]:
        """Return the cells of the study: all variants of a seed, then those of the next seed."""
        return [job.cell for job in self._expand().jobs]

    def run(self, *, jobs: int | None = None, limit: int | None = None) -> bool:
        """Train the cells without a result, write the tables, and return True if none is missing.

        At most `jobs` cells run at once (by default one for each GPU or core), and at most `limit`
        in total. The runner is a process of its own, whose output appears every second. A notebook
        shows the status of the cells above it. KeyboardInterrupt stops the runner as Ctrl-C does,
        and another call continues it.
        """
        self._expand()
        options = {
            "--study": self.name,
            "--out": self.out,
            "--reports": self.reports,
            "--jobs": jobs,
            "--limit": limit,
        }
        words = [f"{name}={value}" for name, value in options.items() if value is not None]
        exit_code = self._call_runner([str(self.path), *words])
        if exit_code not in (0, 1):
            raise ConfigError(f"study {self.name} stopped with exit code {exit_code}")
        return exit_code == 0

    def _call_runner(self, words: list[str]) -> int:
        """Call the runner, show its output and the status, and return its exit code."""
        command = [sys.executable, "-m", "lit_attn.ablate", *words]
        show = open_notebook_display()
        with tempfile.NamedTemporaryFile() as log, Path(log.name).open(errors="replace") as output:
            # On a terminal the runner draws its live table itself.
            stream = None if sys.stdout.isatty() else log
            with subprocess.Popen(command, stdout=stream, stderr=stream) as runner:
                try:
                    while runner.returncode is None:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            runner.wait(1.0)
                        print(output.read(), end="", flush=True)
                        show(self._describe)
                except KeyboardInterrupt:
                    runner.send_signal(signal.SIGINT)
                    runner.wait()
                    raise
        return runner.returncode

    def status(self) -> "pd.DataFrame":
        """Return one row for each cell: variant, seed, state, what makes it stale, and folder."""
        import pandas as pd

        rows = []
        find_change = change_finder()
        matrix = self._expand()
        for job in (*matrix.screening_jobs, *matrix.jobs):
            change = find_change(read_result(job.folder, job.identity))
            row = {
                "variant": job.variant,
                "seed": job.seed,
                "state": job.state(),
                "stale": change,
                "folder": str(job.folder),
            }
            rows.append(row)
        return pd.DataFrame(rows, columns=["variant", "seed", "state", "stale", "folder"])

    def results(self) -> "pd.DataFrame":
        """Return one row for each finished cell.

        The columns are variant, seed, all keys of the experiment (`optimizer.lr`; lists as JSON),
        all metrics (`test/accuracy`, not scaled), and COSTS.
        """
        import pandas as pd

        rows = []
        for job in self._expand().jobs:
            result = read_result(job.folder, job.identity)
            if result is None:
                continue
            settings = pd.json_normalize(job.config["experiment"]).iloc[0]
            settings = settings.map(_list_to_json)
            costs = {}
            for name in COSTS:
                value = getattr(result, name)
                # The record of a time has several statistics, of which this is the median.
                costs[name] = getattr(value, "median", value)
            row = {"variant": job.variant, "seed": job.seed, **settings}
            rows.append(row | result.metrics | costs)
        if not rows:
            return pd.DataFrame([], columns=["variant", "seed"])
        return pd.DataFrame(rows)

    def table(self) -> "pd.DataFrame":
        """Write the report of the finished cells and return its table (`table.csv`)."""
        return read_csv(self._write_report() / "table.csv")

    def figures(self) -> dict[str, Path]:
        """Write the report of the finished cells and return its figures (SVG files) by name."""
        return {path.stem: path for path in sorted(self._write_report().glob("*.svg"))}

    def _expand(self, texts: dict[Path, str] | None = None) -> Matrix:
        """Return the cells, read again because a run can choose settings (`tune`)."""
        studies = read_studies(self.path, texts)
        require(f"{self.path}: no study", self.name, studies)
        return expand(studies[self.name], self.out)

    def _describe(self) -> str:
        """Return a progress bar, and the status of the cells as the command `status` prints it."""
        folder = self.out / self.name
        plan = Plan.read_valid(folder / "plan.json")
        if plan is None:
            return "starting"
        cells = read_cells(plan, folder)
        return f"{draw_bar(measure_share(cells))}\n{describe(plan, cells)}"

    def _write_report(self) -> Path:
        """Write the report of the finished cells, and return its folder."""
        self._expand().write_plan()
        (folder,) = write_reports(self.out, self.reports, [self.name])
        return folder


def _to_yaml(path: Path, value: dict[str, Any]) -> str:
    """Return a mapping as YAML for `path`; ConfigError if another file exists there."""
    if path.exists() and WRITTEN.encode() not in path.read_bytes():
        raise ConfigError(f"{path}: was not written by Study; choose another name or folder")
    # Values can be paths and tuples, which YAML does not have.
    plain_value = json.loads(json.dumps(value, default=str))
    content = format_yaml(plain_value)
    return f"{WRITTEN}\n{content}"


def _list_to_json(value: Any) -> Any:
    """Return a list as JSON, which fits into a cell of a table, and other values as they are."""
    return json.dumps(value) if isinstance(value, list) else value
