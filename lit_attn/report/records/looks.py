"""Record of the looks at a running study, which use a part of the error of its last look."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from lit_attn.cells.decisions import Look, Looks
from lit_attn.files import one_at_a_time
from lit_attn.report.records.skipped import LOG, describe_failure
from lit_attn.report.records.study_record import StudyRecord
from lit_attn.report.verdicts.comparison import compare_variants


def record_looks(studies: Iterable[StudyRecord], runs: Path) -> Iterator[StudyRecord]:
    """Yield the studies in the folder `runs`, and record each look at a running one."""
    for study in studies:
        name = study.plan.study
        try:
            record_look(study, runs / name)
        except Exception as error:
            # The tables of this study, and those of the next studies, do not depend on the look.
            LOG.warning("%s: %s. This look is not recorded.", name, describe_failure(error))
        yield study


def record_look(study: StudyRecord, folder: Path) -> None:
    """Append a look to `looks.json` in the study's folder if a variant could have had a verdict.

    A look at a complete study is the last one and is not recorded. A look with too few pairs for a
    star uses no error. A folder that cannot be written is a copy of the records.
    Raises ConfigError for earlier looks that cannot be read, which a new file would forget.
    """
    planned = len(study.plan.seeds)
    seeds = _count_decisive_pairs(study)
    if seeds is None or (study.looks is not None and study.looks.has_any(planned)):
        return
    look = Look(seeds=seeds, planned=planned)
    path = folder / "looks.json"
    with contextlib.suppress(OSError), one_at_a_time(folder, "looks"):
        before = Looks.read(path)
        entries = [] if before is None else before.entries
        Looks(entries=[*entries, look]).write(path)


def _count_decisive_pairs(study: StudyRecord) -> int | None:
    """Return the most pairs of a running variant that could have a verdict, None without one."""
    interim = compare_variants(study).interim
    has_margin = study.plan.metric.margin is not None
    decisive = []
    for pairs, level in interim.items():
        can_have_star = study.test.find_smallest_p(pairs) <= level
        has_interval = has_margin and pairs > 1
        if can_have_star or has_interval:
            decisive.append(pairs)
    return max(decisive, default=None)
