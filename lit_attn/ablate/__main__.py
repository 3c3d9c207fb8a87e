"""Run the studies of an ablations.yaml: `python -m lit_attn.ablate ablations.yaml`."""

import argparse
import contextlib
import io
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from lit_attn.ablate import adopt, dry_run, papers, status
from lit_attn.ablate.display import make_display, write_line
from lit_attn.ablate.origin import claim_folder, is_claimed, require_origin
from lit_attn.ablate.plan import Job, Matrix, expand, require_inputs, select_cells, set_aside
from lit_attn.ablate.slots import make_slots
from lit_attn.cells.folder import read_cell
from lit_attn.cells.inputs import change_finder
from lit_attn.cells.lock import require_locks
from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.papers import SIZES, read_paper
from lit_attn.config.source import Mapping, Where, parse_value
from lit_attn.config.study import MOST_SEEDS, Seeds, choose, read_studies
from lit_attn.files import require_writable
from lit_attn.schema.errors import ConfigError, OneLineParser, command, plural, program, suggest
from lit_attn.schema.sources import freeze_package

if TYPE_CHECKING:
    from lit_attn.ablate.launch import Launcher
    from lit_attn.ablate.runner import Summary

    Start = Callable[[list[Job]], Summary]

TARGET = "lit_attn.train:run_cell"
COMMANDS = {"status": status.print_status, "logs": status.print_log}
DESCRIPTIONS = {
    "": "Train every variant with every seed, then write the tables; the same command continues.",
    "rerun": "Set the cells of CHOICE aside and train them again from their first step.",
    "seal": "Print the decisions of a study and their hash, to commit them before the first run.",
}
EPILOG = Path(__file__).with_name("epilog.txt").read_text(encoding="utf-8")


def make_parser(first: str = "") -> argparse.ArgumentParser:
    """Return the parser of the words after `first`, which is `rerun`, `seal` or none."""
    parser = OneLineParser(
        prog=program(first or "run") + " CHOICE" * (first == "rerun"),
        description=DESCRIPTIONS[first],
        epilog=EPILOG.replace("lit-attn", program("")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def flag(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    def several(name: str, metavar: str, text: str) -> None:
        parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)

    def value(
        name: str, kind: Callable[[str], object], metavar: str, text: str, default: object = None
    ) -> None:
        parser.add_argument(name, type=kind, metavar=metavar, help=text, default=default)

    text = "File of studies (not with --paper)."
    parser.add_argument("file", type=Path, metavar="ablations.yaml", nargs="?", help=text)
    several("--study", "NAME", "Run this study (default: studies with `default: true`).")
    value("--paper", str, "NAME", "Run the tables and figures of a paper (see experiments/papers).")
    several("--table", "NUMBER", "With --paper: run this table (2) or figure (figure-2) only.")
    add_size = parser.add_mutually_exclusive_group().add_argument
    for name, size in SIZES.items():
        text = f"With --paper: run models for two CPU cores on {size} data."
        add_size(name, dest="small", action="store_const", const=size, default="", help=text)
    text = "With --paper: print GPU time; run nothing."
    parser.add_argument("--cost", choices=papers.PEAKS, help=text)
    flag("--dry-run", "List the cells and their states; run nothing.")
    flag("--params", "With --dry-run: show parameters and FLOPs.")
    flag("--estimate", "With --dry-run: time a few steps of each model; show the expected hours.")
    value("--jobs", int, "N", "Run at most N cells at once (default: one per GPU, or per core).")
    value("--seeds", str, "N|A,B,...", "Use N seeds, or the seeds A, B, ... ('7,' is one seed).")
    several("--set", "KEY=VALUE", "Override a key of all variants, in a trial with own folders.")
    value("--limit", int, "N", "Run at most N of the missing cells.")
    value("--out", Path, "DIR", "Write results to DIR (default: runs, or runs/smoke).")
    value("--reports", Path, "DIR", "Write tables to DIR (default: reports).")
    text = "Use finished cells of renamed studies and variants, and folders of replaced files."
    flag("--adopt", text)
    flag("--smoke", "Run one small step of every cell, in a separate folder.")
    value("--stall", float, "MINUTES", "Kill a cell without a step for MINUTES (default 30).", 30)
    text = "Run the cells on this machine or as SLURM jobs (default: local)."
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local", help=text)
    flag("--cancel", "With --launcher slurm: cancel the jobs of the studies.")
    flag("--cancel-removed", "As --cancel, but only jobs of cells that the file no longer has.")
    flag("--quiet-timing", "Measure step times after the cells, or at once with --dry-run.")
    flag("--allow-noisy-timing", "Accept step times that vary by more than a tenth.")
    return parser


@command
def main(arguments: Sequence[str] | None = None, target: str = TARGET) -> int:
    """Run a command and return its exit code (see EPILOG); cells run the function `target`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Tables contain characters that an ASCII terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    first, choice = words.pop(0) if words and words[0] in ("rerun", "seal") else "", None
    if first == "rerun" and not {"-h", "--help"} & set(words):
        if len(words) < 2:
            raise ConfigError("rerun: needs stale, failed or STUDY/VARIANT/SEED, and then the file")
        choice = words.pop(0)
    options, unknown = make_parser(first).parse_known_args(words)
    if unknown:
        names = [f"--{name.replace('_', '-')}" for name in vars(options)]
        if unknown[0].startswith("-"):
            raise ConfigError(f"{unknown[0]}: unknown option{suggest(unknown[0], names)}")
        text = "is not an option, and there can be one file only; for seeds write --seeds 0,1,2"
        raise ConfigError(f"'{unknown[0]}' {text}")
    _complete_options(options)
    matrices = _expand_studies(options)
    if first == "seal":
        for matrix in matrices:
            print(matrix.seal(matrix.plan().seeds).model_dump_json(indent=2, exclude={"results"}))
        return 0
    if options.cost:
        items = options.paper.items(options.table)
        papers.print_costs(options.paper, items, matrices, options.cost)
        return 0
    _require_origins(matrices, options)
    if options.adopt and not options.dry_run:
        missing = [job for m in matrices for job in (*m.jobs, *m.trials) if job.state() != "done"]
        for line in adopt.adopt(adopt.find_matches(matrices, missing)):
            write_line(line)
        # The results of trials decide on further cells.
        matrices = _expand_studies(options)
    is_idle = options.dry_run or options.cancel
    is_first = options.quiet_timing and (options.dry_run or options.launcher == "slurm")
    if unmeasured := [m for m in matrices if is_first or not (m.is_measured or is_idle)]:
        # The cells at equal time follow from the measurement.
        _measure_step_times(unmeasured, options)
        matrices = _expand_studies(options)
    chosen = None if choice is None else select_cells(matrices, choice)
    if options.dry_run and chosen is not None:
        lines = [f"{job.name}  {job.state()}" for job in chosen]
        print(*lines, plural(len(chosen), "cell"), sep="\n")
        return 0
    if options.dry_run and options.estimate:
        return 0 if dry_run.print_estimate(matrices, options.jobs) else 1
    if options.dry_run:
        missing = dry_run.print_cells(matrices, with_costs=options.params)
        for line in adopt.describe(adopt.find_matches(matrices, missing)):
            print(line)
        return 0
    from lit_attn.ablate.runner import handle_signals

    # The tables after the last cell come from the same code, whatever is checked out meanwhile.
    freeze_package()
    # A signal during the check of the models or the reports removes temporary files.
    with handle_signals(lambda number, _: sys.exit(128 + number)):
        return _run(matrices, options, target, chosen)


def parse_settings(settings: list[str]) -> Mapping:
    """Return the KEY=VALUE strings of --set as a mapping. Raises ConfigError for a mistake."""
    changes = Mapping(Where("--set"))
    for setting in settings:
        key, equals, value = setting.partition("=")
        where = Where(f"--set {setting}")
        if not equals:
            raise ConfigError(f"{where}: write KEY=VALUE")
        if key in changes:
            raise ConfigError(f"{where}: '{key}' is set twice")
        changes.put(key, parse_value(value, str(where)), where)
    return changes


def _complete_options(options: Namespace) -> None:
    """Set default folders and read the paper. Raises ConfigError for options that do not fit."""
    for name in ("jobs", "limit", "stall"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise ConfigError(f"--{name}: the number must be positive")
    conditions = {
        "--dry-run": (options.dry_run, ("params", "estimate")),
        "--launcher slurm": (options.launcher == "slurm", ("cancel", "cancel_removed")),
        "--paper": (options.paper, ("table", "small", "cost")),
    }
    for condition, (is_met, names) in conditions.items():
        for name in names:
            if getattr(options, name) and not is_met:
                raise ConfigError(f"--{name.replace('_', '-')}: needs {condition}")
    options.cancel |= options.cancel_removed
    options.out = options.out or Path("runs/smoke" if options.smoke else "runs")
    options.reports = options.reports or (options.out if options.smoke else Path()) / "reports"
    if options.paper:
        if options.study or options.file:
            raise ConfigError("--paper: replaces the file of studies and --study")
        options.paper = read_paper(options.paper, options.small)
        return
    if options.file is None:
        raise ConfigError("name a file of studies, such as ablations.yaml, or --paper NAME")
    if not options.file.exists():
        files = map(str, sorted(options.file.parent.glob("*.y*ml")))
        hint = suggest(str(options.file), [*COMMANDS, "rerun", "seal", *files])
        raise ConfigError(f"{options.file}: no such file or command{hint}")


def _expand_studies(options: Namespace) -> list[Matrix]:
    """Return the cells of the chosen studies. Raises ConfigError for a mistake in a study."""
    changes, seeds = parse_settings(options.set), _parse_seeds(options.seeds)
    if options.paper:
        arguments = (options.table, options.out, changes, seeds, options.smoke)
        return papers.expand_paper(options.paper, *arguments)
    studies = choose(read_studies(options.file), options.study, options.file)
    return [expand(study, options.out, changes, seeds, options.smoke) for study in studies]


def _require_origins(matrices: list[Matrix], options: Namespace) -> None:
    """Raise ConfigError if the folder of a study belongs to another file, unless with --adopt."""
    for matrix in matrices:
        if options.adopt and not options.dry_run and is_claimed(matrix.folder):
            claim_folder(matrix.source, matrix.folder, is_replacing=True)
        elif change := require_origin(matrix.source, matrix.folder):
            write_line(change)


def _parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Return the seeds of `5` (0 to 4), `0,50,100` or `7,`. Raises ConfigError for a mistake."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.removesuffix(",").split(",")]
        value = numbers if "," in text else numbers[0]
        seeds: tuple[int, ...] = TypeAdapter(Seeds).validate_python(value)
    except ValueError as error:
        hint = f"a count up to {MOST_SEEDS:,} such as 5, or different seeds up to {LARGEST_SEED}"
        raise ConfigError(f"--seeds {text}: write {hint} such as 0,50,100 or 7,") from error
    return seeds


def _measure_step_times(matrices: list[Matrix], options: Namespace) -> None:
    """Measure the missing step times for `match: time` or --quiet-timing."""
    for matrix in matrices:
        # Imported here, because a plain dry run starts no processes.
        from lit_attn.ablate.step_times import measure_step_times

        if options.launcher == "slurm":
            command = f"{options.file} --study {matrix.source.name} --dry-run --quiet-timing"
            start = f"{matrix.name}: step times: measure on a node first"
            raise ConfigError(f"{start}: srun {program('run')} {command}")
        allowed = options.allow_noisy_timing or options.smoke
        measure_step_times(matrix, make_slots(options.jobs), is_noise_allowed=allowed)


def _run(matrices: list[Matrix], options: Namespace, target: str, chosen: list[Job] | None) -> int:
    """Run the missing cells, or the `chosen` cells from their first step, and write the tables."""
    if options.cancel:
        from lit_attn.ablate.slurm import cancel

        print(f"{plural(cancel(matrices, options.cancel_removed), 'job')} cancelled")
        for matrix in matrices:
            if options.cancel_removed and matrix.folder.exists():
                matrix.write_plan()
        return 0
    # Imported here, because a dry run starts no processes.
    from lit_attn.ablate.launch import Launcher

    launcher = Launcher(target, options.smoke)
    prepare = _prepare_slurm if options.launcher == "slurm" else _prepare_local
    start = prepare(matrices, options, launcher)
    require_locks(options.out)
    for folder in (options.reports, *(options.reports / matrix.name for matrix in matrices)):
        require_writable(folder, "--reports")

    if chosen is None:
        matrices = _tune(matrices, options, launcher, start)
    cells = [(job, read_cell(job.folder, job.identity)) for m in matrices for job in m.jobs]
    diverged, rerun = 0, program("rerun")
    if (jobs := chosen) is None:
        jobs = [job for job, cell in cells if cell.state not in ("done", "diverged")]
        diverged = sum(cell.state == "diverged" for _, cell in cells)
    jobs = jobs[: options.limit]
    _prepare_folders(matrices, options, launcher, jobs, chosen is not None)
    for matrix in matrices:
        if matrix.name != matrix.source.name:
            write_line(f"{matrix.folder}: trial; study {matrix.source.name} does not change")
    folders = {job.folder for job in jobs}
    done = [cell for job, cell in cells if cell.state == "done" and job.folder not in folders]
    write_line(f"{plural(len(cells), 'cell')}: {len(done)} done, {len(jobs)} to run")
    if chosen is None:
        missing = [job for job, cell in cells if cell.result is None]
        for line in adopt.describe(adopt.find_matches(matrices, missing)):
            write_line(line)
    if changes := [*filter(None, map(change_finder(), (cell.result for cell in done)))]:
        write_line(f"stale: {plural(len(changes), 'done cell')}; {changes[0]}; see `{rerun} stale`")
    if diverged:
        write_line(f"skipped: {plural(diverged, 'cell')} that diverged; see `{rerun} failed`")
    summary = start(jobs)
    try:
        if summary.stopped_by is None and options.quiet_timing:
            _measure_step_times(matrices, options)
    finally:
        if summary.stopped_by in (None, signal.SIGINT):
            _write_tables(matrices, options)
    if summary.stopped_by is not None:
        return 128 + summary.stopped_by
    return 1 if summary.failed or diverged or any(matrix.untuned for matrix in matrices) else 0


def _prepare_folders(
    matrices: list[Matrix], options: Namespace, launcher: "Launcher", jobs: list[Job], rerun: bool
) -> None:
    """Check what `jobs` need, set their folders aside for a rerun, and write the plans."""
    if is_local := options.launcher == "local":
        require_inputs(matrices, jobs)
    launcher.require_cells(matrices, jobs, options.jobs, is_local)
    for job in jobs if rerun else ():
        set_aside(job)
    for matrix in matrices:
        matrix.write_plan()


def _tune(
    matrices: list[Matrix], options: Namespace, launcher: "Launcher", start: "Start"
) -> list[Matrix]:
    """Run the trials of `tune` and return the cells of the tuned variants.

    A cell is tried once in a run: a search with a failed cell continues in the next run. Raises
    SystemExit if the run is stopped.
    """
    attempted: set[Path] = set()
    while True:
        trials = [job for m in matrices for job in m.trials if job.folder not in attempted]
        trials = [job for job in trials if job.state() not in ("done", "diverged")]
        trials = trials[: options.limit]
        if not trials:
            return matrices
        _prepare_folders(matrices, options, launcher, trials, rerun=False)
        write_line(f"tuning: {plural(len(trials), 'cell')} to run")
        summary = start(trials)
        if summary.stopped_by is not None:
            raise SystemExit(128 + summary.stopped_by)
        attempted.update(job.folder for job in trials)
        options.limit = options.limit and options.limit - len(trials)
        matrices = _expand_studies(options)


def _write_tables(matrices: list[Matrix], options: Namespace) -> None:
    # Imported here, because a dry run needs no reports.
    from lit_attn.report import write_reports

    # Written again, because another command may have started further seeds in the meantime. On a
    # full disk the first plan remains.
    with contextlib.suppress(OSError):
        for matrix in matrices:
            matrix.write_plan()
    names = [matrix.name for matrix in matrices]
    for folder in write_reports(options.out, options.reports, names):
        table = (folder / "table.md").read_text(encoding="utf-8")
        write_line(f"\n{table}")
    write_line(f"{options.reports / 'index.html'}")
    if options.paper:
        from lit_attn.report.papers_page import write_paper

        # The page has all tables, whichever of them this command has run.
        write_line(str(write_paper(options.paper, options.out, options.reports)))


def _prepare_local(matrices: list[Matrix], options: Namespace, launcher: "Launcher") -> "Start":
    """Return the function that runs cells on this machine. Raises ConfigError if a cell cannot."""
    from lit_attn.ablate.runner import Runner

    slots = make_slots(options.jobs)
    slots.check(job.cell for matrix in matrices for job in (*matrix.trials, *matrix.jobs))

    def start(missing: list[Job]) -> "Summary":
        write_line(f"{slots.at_once(job.cell for job in missing)} at once")
        return Runner(launcher, slots, make_display(), 60 * options.stall).run(missing)

    return start


def _prepare_slurm(matrices: list[Matrix], options: Namespace, launcher: "Launcher") -> "Start":
    """Return the function that runs cells as SLURM jobs. Raises ConfigError for wrong resources."""
    from lit_attn.ablate.slurm import Follower, SlurmCell, require_resources, submit_missing

    for matrix in matrices:
        require_resources(matrix)

    def start(missing: list[Job]) -> "Summary":
        cell = SlurmCell(Path(), launcher.target, options.smoke, 60 * options.stall)
        count = submit_missing(matrices, missing, cell, options.jobs)
        write_line(f"{plural(count, 'job')} submitted, {len(missing) - count} already submitted")
        return Follower(matrices, make_display()).run(missing)

    return start


if __name__ == "__main__":
    sys.exit(main())
