"""Run the studies of an ablations.yaml: `python -m lit_attn.ablate ablations.yaml`."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lit_attn.ablate import dry_run, inspect
from lit_attn.ablate.plan import Job, Matrix, expand, require_inputs
from lit_attn.config.cell import LARGEST_SEED
from lit_attn.config.source import Mapping, Where, parse_value
from lit_attn.config.study import MOST_SEEDS, choose, read_studies
from lit_attn.files import require_writable
from lit_attn.schema.errors import ConfigError, suggest

if TYPE_CHECKING:
    from lit_attn.ablate.runner import Limits, Summary

    Start = Callable[[list[Job]], Summary]

TARGET = "lit_attn.train:run_cell"

EXIT_CODES = """\
beside it:
  python -m lit_attn.ablate status [ablations.yaml or runs]   what is done, what failed, why
  python -m lit_attn.ablate logs STUDY/VARIANT/SEED           what a cell has said

exit codes:
  0    every cell that was to run has a result
  1    some cells have none: failed now, or diverged before (see --retry)
  2    bad configuration or usage; nothing was started
  130  stopped by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP; the same command goes on
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m lit_attn.ablate",
        description="Train every variant of a study over its seeds, and write the tables. "
        "The same command again runs what is missing.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("file", type=Path, metavar="ablations.yaml")
    add("--study", action="append", default=[], metavar="NAME", help="may be repeated")
    add("--dry-run", action="store_true", help="list the cells and what is already done")
    add("--params", action="store_true", help="with --dry-run: parameters and FLOPs as well")
    add("--estimate", action="store_true", help="with --dry-run: measure a few steps of each model")
    add("--jobs", type=int, metavar="N", help="cells at once; default: one per GPU, or per core")
    add("--seeds", metavar="N|A,B,...", help="a count, or the seeds themselves; one seed is 'A,'")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="for all variants: a trial")
    add("--limit", type=int, metavar="N", help="run at most N cells of what is missing")
    add("--out", type=Path, metavar="DIR", help="default: runs, or runs/smoke")
    add("--reports", type=Path, metavar="DIR", help="default: reports, or runs/smoke/reports")
    add("--smoke", action="store_true", help="one tiny step of every cell, in a folder of its own")
    add("--stall", type=float, metavar="MINUTES", default=30, help="end a cell without a step")
    add("--time", type=float, metavar="MINUTES", default=math.inf, help="end a longer attempt")
    add("--launcher", choices=("local", "slurm"), default="local", help="where cells run")
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help="as `slurm:` of a study")
    add("--cancel", action="store_true", help="with --launcher slurm: cancel the studies' jobs")
    add("--retry", action="store_true", help="run again what has diverged")
    return made


def main(arguments: Sequence[str] | None = None, target: str = TARGET) -> int:
    """Returns the exit code, see EXIT_CODES; `target` is the `module:function` that runs a cell."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and words[0] in inspect.COMMANDS:
            return inspect.main(words)
        options, more = parser().parse_known_args(words)
        _nothing_more(more, [f"--{name.replace('_', '-')}" for name in vars(options)])
        matrices = _matrices(options)
        if options.dry_run:
            if options.estimate:
                return _estimate(matrices, options.jobs)
            dry_run.show(matrices, options.params, sys.stdout)
            return 0
        return _run(matrices, options, target)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # `| head` has read enough; at exit Python would flush into the closed pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _nothing_more(words: list[str], known: list[str]) -> None:
    """Raise ConfigError for what the command line has beyond its options, as `--seeds 0 1` has."""
    if not words:
        return
    word = words[0]
    if word.startswith("-"):
        raise ConfigError(f"{word}: is not an option{suggest(word, known)}")
    raise ConfigError(
        f"{word}: one file of studies at a time; several seeds are written --seeds 0,1,2, "
        "several studies --study A --study B"
    )


def _matrices(options: argparse.Namespace) -> list[Matrix]:
    for name in ("jobs", "limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name}: needs a number from 1")
    for name in ("stall", "time"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name}: needs a number of minutes above 0")
    if options.launcher == "local" and (options.slurm or options.cancel):
        raise ConfigError(f"--{'slurm' if options.slurm else 'cancel'}: goes with --launcher slurm")
    for name in ("params", "estimate"):
        if getattr(options, name) and not options.dry_run:
            raise ConfigError(f"--{name}: goes with --dry-run")
    options.out = options.out or Path("runs/smoke" if options.smoke else "runs")
    default = options.out / "reports" if options.smoke else Path("reports")
    options.reports = options.reports or default
    studies = choose(read_studies(options.file), options.study, options.file)
    changes, seeds = _changes("--set", options.set), _seeds(options.seeds)
    return [expand(study, options.out, changes, seeds, options.smoke) for study in studies]


def _changes(option: str, settings: list[str]) -> Mapping:
    changes = Mapping(Where(option))
    for setting in settings:
        key, equals, value = setting.partition("=")
        where = Where(f"{option} {setting}")
        if not equals:
            raise ConfigError(f"{where}: needs KEY=VALUE")
        if key in changes:
            raise ConfigError(f"{where}: '{key}' is set twice")
        changes.put(key, parse_value(value, str(where)), where)
    return changes


def _seeds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    *numbers, last = [part.strip() for part in text.split(",")]
    counted = not numbers
    numbers = [*numbers, last] if last or counted else numbers
    if not all(number.isdecimal() for number in numbers) or (counted and int(last) == 0):
        raise ConfigError(f"--seeds {text}: needs a count, as 5, or seeds, as 0,50,100")
    if counted and int(last) > MOST_SEEDS:
        raise ConfigError(
            f"--seeds {text}: a count is at most {MOST_SEEDS:,}; one seed is written '{last},'"
        )
    seeds = tuple(range(int(last)) if counted else map(int, numbers))
    if max(seeds) > LARGEST_SEED:
        raise ConfigError(f"--seeds {text}: a seed is at most {LARGEST_SEED}")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: a seed is written twice")
    return seeds


def _estimate(matrices: list[Matrix], at_once: int | None) -> int:
    # Not at the top: a plain dry run starts no processes.
    from lit_attn.ablate import estimate
    from lit_attn.ablate.slots import make_slots

    return 0 if estimate.show(matrices, make_slots(at_once), sys.stdout) else 1


def _run(matrices: list[Matrix], options: argparse.Namespace, target: str) -> int:
    # Not at the top: a dry run has no use for processes, locks and displays.
    from lit_attn.report import write_reports

    if options.cancel:
        from lit_attn.ablate.slurm.queue import cancel

        print(f"{cancel(matrices)} jobs cancelled")
        return 0
    prepare = _on_slurm if options.launcher == "slurm" else _on_this_machine
    start = prepare(matrices, options, target)
    tables = [options.reports / matrix.name for matrix in matrices]
    for folder in (options.reports, *(folder for folder in tables if folder.exists())):
        require_writable(folder, "--reports")
    states = [(job, job.state()) for matrix in matrices for job in matrix.jobs]
    diverged = [job for job, found in states if found == "diverged" and not options.retry]
    missing = [job for job, found in states if found != "done" and job not in diverged]
    done = len(states) - len(missing) - len(diverged)
    missing = missing[: options.limit]
    if options.launcher == "local":
        require_inputs(matrices, missing)
    try:
        for matrix in matrices:
            matrix.write_plan()
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot be written: {error.strerror}") from error
    for matrix in matrices:
        if matrix.is_trial:
            print(f"{matrix.folder}: a trial; study {matrix.source.name} stays as it is")
    # Flushed, as what comes next takes long, or goes to the other stream.
    print(f"{len(states)} cells: {done} done, {len(missing)} to run", flush=True)
    if diverged:
        again = f"{len(diverged)} diverged before and would again: --retry runs them all the same"
        print(again, flush=True)
    summary = start(missing)
    if summary.stopped_by not in (None, signal.SIGINT):
        return 128 + summary.stopped_by

    # Once more: another command may have begun further seeds meanwhile.
    for matrix in matrices:
        matrix.write_plan()
    names = [matrix.name for matrix in matrices]
    write_reports(options.out, options.reports, names)
    for name in names:
        print(f"\n{(options.reports / name / 'table.md').read_text(encoding='utf-8')}")
    print(f"{options.reports / 'index.html'}")
    if summary.stopped_by is not None:
        return 128 + summary.stopped_by
    return 1 if summary.failed or diverged else 0


def _on_this_machine(matrices: list[Matrix], options: argparse.Namespace, target: str) -> "Start":
    from lit_attn.ablate.display import make_display
    from lit_attn.ablate.launch import Launcher
    from lit_attn.ablate.runner import Runner
    from lit_attn.ablate.slots import make_slots

    slots = make_slots(options.jobs)
    slots.check(job.cell for matrix in matrices for job in matrix.jobs)

    def start(missing: list[Job]) -> "Summary":
        print(f"{slots.at_once(job.cell for job in missing)} at once", flush=True)
        launcher = Launcher(target, options.smoke)
        return Runner(launcher, slots, make_display(sys.stdout), _limits(options)).run(missing)

    return start


def _on_slurm(matrices: list[Matrix], options: argparse.Namespace, target: str) -> "Start":
    from lit_attn.ablate.display import make_display
    from lit_attn.ablate.slurm.follow import Follower
    from lit_attn.ablate.slurm.job import SlurmCell
    from lit_attn.ablate.slurm.submit import resources, submit_missing

    changes = _changes("--slurm", options.slurm)
    wanted = {matrix.folder: resources(matrix, changes) for matrix in matrices}

    def cell(job: Job) -> SlurmCell:
        return SlurmCell(job.folder.resolve(), target, options.smoke, _limits(options))

    def start(missing: list[Job]) -> "Summary":
        count = submit_missing(matrices, missing, wanted, cell, options.jobs)
        print(f"{count} jobs submitted, {len(missing) - count} were there already", flush=True)
        return Follower(matrices, make_display(sys.stdout)).run(missing)

    return start


def _limits(options: argparse.Namespace) -> "Limits":
    from lit_attn.ablate.runner import Limits

    return Limits(stall=60 * options.stall, time=60 * options.time)


if __name__ == "__main__":
    sys.exit(main())
