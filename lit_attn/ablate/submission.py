"""A submission: the records of a study in one folder, which anybody can judge.

    FOLDER/submission.json                  Submission: versions, and the hash of every other file
    FOLDER/judgement.json                   the answer of `judge FOLDER --json`
    FOLDER/STUDY/plan.json, seals.json, ... the records of the study
    FOLDER/STUDY/CELL/result.json           the values of a seed
    FOLDER/STUDY/CELL/attempts/<k>/         exit.json, and the end of log.txt

All files are JSON, CSV or plain text, and `judge` imports nothing that they name. Folders,
addresses, and the names of the host and the user are removed from logs and messages.
"""

import contextlib
import getpass
import hashlib
import json
import os
import platform
import re
import socket
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import lit_attn
from lit_attn.cells import decisions, records
from lit_attn.cells.floors import FILE as FLOORS_FILE
from lit_attn.cells.floors import Floors
from lit_attn.cells.folder import list_attempts
from lit_attn.cells.screening import FILE as SCREENING_FILE
from lit_attn.cells.screening import Screening
from lit_attn.files import require_writable, write_atomic
from lit_attn.report.answers.entry import write_answer
from lit_attn.report.answers.judged import JudgeAnswer, JudgedStudy
from lit_attn.report.records.read import read_studies
from lit_attn.report.verdicts.judge import judge_study
from lit_attn.schema.errors import ConfigError, plural
from lit_attn.schema.publish import hide_in_text, hide_private

FILE = records.SUBMISSION
JUDGEMENT = "judgement.json"

FORMAT = 1
"""Version of the layout of a submission; a folder with a newer one is not judged."""

LOG_BYTES = 65536
"""Most bytes of the end of a log that a submission has."""

SEALS = "seals.json"

STUDY_RECORDS: dict[str, type[records.Record]] = {
    "plan.json": records.Plan,
    "looks.json": decisions.Looks,
    "endings.json": decisions.Endings,
    "tuning.json": records.Tuning,
    SCREENING_FILE: Screening,
    "step_times.json": records.StepTimes,
    FLOORS_FILE: Floors,
}
"""Records of a study that a submission has; origin.json names a file of the user."""

PACKAGES = ("numpy", "scipy", "pandas")
"""Packages that compute a judgement, so that their versions can change its last digits."""


class Submission(records.Record):
    """Content of submission.json. `files` has the SHA-256 of every file by its path in the folder.

    `hash` is the SHA-256 of these hashes: who knows it notices any changed value.
    """

    format: int = FORMAT
    study: str
    versions: dict[str, str]
    hash: str
    files: dict[str, str]


class _Names:
    """Filter of the names of this host and user, and of words that the user adds, in logs."""

    def __init__(self, words: Iterable[str]) -> None:
        # A host with a domain is also called by its first label.
        host = socket.gethostname()
        private = {host, host.partition(".")[0], Path.home().name, *words}
        # In a container the process can have a number that no user has.
        with contextlib.suppress(OSError, KeyError):
            private.add(getpass.getuser())
        # The longest word comes first, because a shorter one can be its beginning.
        ordered = sorted(private - {""}, key=lambda word: (-len(word), word))
        choices = "|".join(re.escape(word) for word in ordered)
        self._pattern = re.compile(rf"(?<!\w)(?:{choices})(?!\w)", re.IGNORECASE)

    def hide(self, text: str) -> str:
        """Return a text of a log or a message without paths, addresses and names."""
        lines = [hide_in_text(line) for line in text.split("\n")]
        return self._pattern.sub("(removed)", "\n".join(lines))


def write_submission(folder: Path, target: Path, words: Sequence[str] = ()) -> Submission:
    """Write the records of the study in `folder` to the new folder `target`.

    `words` are further private words, which logs lose. Raises ConfigError if `target` exists, or if
    the records cannot be judged.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: exists already; name another folder with --to")
    require_writable(target.parent, "--to")
    names = _Names(words)
    plan = records.Plan.load(folder / "plan.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".submission.") as temporary:
        copy = Path(temporary, "submission")
        _copy_study(folder, copy / plan.study, plan, names)
        write_atomic(copy / JUDGEMENT, write_judgement(judge_copy(copy, plan.study)))
        files = _hash_files(copy)
        submission = Submission(
            study=plan.study, versions=_find_versions(), hash=_hash_all(files), files=files
        )
        submission.write(copy / FILE)
        copy.rename(target)
    return submission


def read_submission(folder: Path) -> Submission:
    """Return the submission in a folder whose files are those that its sender wrote.

    Raises ConfigError, in one line, for a changed, missing or added file, for a link, and for seals
    that do not have their hash.
    """
    path = folder / FILE
    submission = Submission.read_valid(path)
    if submission is None:
        raise ConfigError(f"{path}: is not what `submit` writes; get the folder again")
    if submission.format > FORMAT:
        raise ConfigError(f"{path}: was written by a newer version of lit_attn; install it")
    # The folder is what its sender wrote only if the file of hashes itself is.
    if submission.hash != _hash_all(submission.files):
        raise ConfigError(f"{path}: hash: is not that of its files; get the folder again")
    files = _hash_files(folder)
    faults = []
    for name in sorted(files.keys() | submission.files.keys()):
        if name not in files:
            faults.append(f"{name} is missing")
        elif name not in submission.files:
            faults.append(f"{name} was added")
        elif files[name] != submission.files[name]:
            faults.append(f"{name} has changed")
    if faults:
        others = f" (and {plural(len(faults) - 1, 'other file')})" if len(faults) > 1 else ""
        raise ConfigError(
            f"{folder}: {faults[0]} since the submission was written{others}; get the folder again"
            " from its sender"
        )
    _check_seals(folder / submission.study / SEALS)
    return submission


def judge_copy(folder: Path, study: str) -> JudgedStudy:
    """Return the verdicts of the study in a submission, the same ones on every machine.

    No look is recorded, and the next action has no command: only its sender has the study's file.
    """
    (record,) = read_studies(folder, [study])
    return judge_study(record)


def write_judgement(judged: JudgedStudy) -> str:
    """Return the content of judgement.json, which is what `judge FOLDER --json` prints."""
    return write_answer(JudgeAnswer(studies=[judged])) + "\n"


def compare_judgement(folder: Path, submission: Submission, judged: JudgedStudy) -> str:
    """Return how a judgement differs from the one in the folder, as a line, or an empty text."""
    if (folder / JUDGEMENT).read_text(encoding="utf-8") == write_judgement(judged):
        return ""
    differences = []
    for name, version_now in _find_versions().items():
        version_then = submission.versions.get(name, "none")
        if version_then != version_now:
            differences.append(f"{name} {version_then} (here {version_now})")
    reason = ", ".join(differences) if differences else "the same versions"
    return f"{folder / JUDGEMENT}: differs from this judgement; it was made with {reason}"


def _copy_study(folder: Path, target: Path, plan: records.Plan, names: _Names) -> None:
    """Write the records of a study and of its planned cells to `target`."""
    for name, kind in STUDY_RECORDS.items():
        record = kind.read(folder / name)
        if isinstance(record, records.Tuning):
            # The tuned values can be files of the user.
            values = record.model_dump()
            values["keys"] = hide_private(values["keys"])
            for variant in values["variants"]:
                variant["chosen"] = hide_private(variant["chosen"])
                for trial in variant["trials"]:
                    trial["values"] = hide_private(trial["values"])
            record = records.Tuning.model_validate(values)
        if record is not None:
            record.write(target / name)
    if decisions.Seals.read(folder / SEALS) is not None:
        # Its hashes are those of the text that was written: private values were removed from it.
        write_atomic(target / SEALS, (folder / SEALS).read_bytes())
    for cell in plan.cells:
        _copy_cell(folder / cell.path, target / cell.path, names)


def _copy_cell(folder: Path, target: Path, names: _Names) -> None:
    """Write the result of a cell, the ends and logs of its attempts, and what it left out."""
    result = records.Result.read_valid(folder / "result.json")
    if result is not None:
        changes = {
            "inputs": _hide_inputs(result.inputs, names),
            "compile_failure": names.hide(result.compile_failure),
            "refused_paths": {key: names.hide(text) for key, text in result.refused_paths.items()},
        }
        result.model_copy(update=changes).write(target / "result.json")
    elif (folder / "result.json").exists():
        # A torn result stays one, without its content.
        write_atomic(target / "result.json", "")
    unreadable = records.read_unreadable(folder)
    if unreadable:
        rows = []
        for image in unreadable:
            # The names of a user's images are not needed, but how many are different.
            digest = hashlib.sha256(image.image.encode()).hexdigest()[:12]
            rows.append((image.split, digest, names.hide(image.reason)))
        write_atomic(target / "unreadable-0.csv", records.csv_lines(rows))
    for attempt in list_attempts(folder):
        copy = target / "attempts" / attempt.name
        copy.mkdir(parents=True)
        end = records.Exit.read_valid(attempt / "exit.json")
        if end is not None:
            message = names.hide(end.message)
            end.model_copy(update={"message": message}).write(copy / "exit.json")
        write_atomic(copy / "log.txt", names.hide(_read_end(attempt / "log.txt")))


def _hide_inputs(inputs: dict[str, str], names: _Names) -> dict[str, str]:
    """Return the stamps of inputs by the last names of their paths, numbered if one is repeated."""
    public: dict[str, str] = {}
    for path, stamp in inputs.items():
        name = names.hide(Path(path).name)
        key = name
        number = 2
        while key in public:
            key = f"{name} ({number})"
            number += 1
        public[key] = stamp
    return public


def _read_end(path: Path) -> str:
    """Return the last whole lines of a log, of at most LOG_BYTES bytes."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    if size > LOG_BYTES:
        # Half of a path would not be removed.
        text = text.partition("\n")[2]
    return text


def _check_seals(path: Path) -> None:
    """Raise ConfigError if a sealed plan does not have the hash that was printed before a run."""
    if decisions.Seals.read(path) is None:
        return
    for entry in json.loads(path.read_bytes())["entries"]:
        # Keys without a value were added by later versions, and are not part of the hash.
        sealed = {
            key: value
            for key, value in entry.items()
            if key not in ("time", "results", "hash") and value is not None
        }
        text = json.dumps(sealed, sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest()[:16] != entry["hash"]:
            raise ConfigError(
                f"{path}: hash: {entry['hash']} is not that of the plan of {entry['time']}; the"
                " plan was changed after it was sealed"
            )


def _find_versions() -> dict[str, str]:
    """Return the versions of everything that computes a judgement."""
    versions = {"lit_attn": lit_attn.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        versions[name] = version(name)
    return versions


def _hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder but submission.json, by path.

    Raises ConfigError for a link, which could lead to another file of the reader.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path}: is no plain file; a submission has no links. Delete it.")
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != FILE:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def _hash_all(files: dict[str, str]) -> str:
    """Return the SHA-256 of the hashes of all files."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
