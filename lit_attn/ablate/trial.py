"""What a run is called: a study, or a trial of it.

Where `--set` makes another experiment of a study than its file does, the run is a trial, and so is
a smoke run. Its runs and tables stand beside the study's, under a name that says what was changed
(`digits@training.max_steps=20`), and the study's own plan and report stay as they are.
"""

import hashlib
import re

from lit_attn.ablate.variants import Variant, resolve
from lit_attn.config.source import Mapping, format_value
from lit_attn.config.study import StudySource
from lit_attn.schema.errors import ConfigError

SMOKE = "smoke"
# No study of a file can be called so: its name has no @.
LABEL = re.compile(r"[A-Za-z0-9._=,+-]{1,80}")


def settings(source: StudySource, variants: list[Variant], changes: Mapping) -> list[str]:
    """Those of `changes` without which `variants` would compute something else, as `key=value`.

    A path, a number of devices and what the study says anyway are none of them.
    """
    computed = _computed(source, variants)
    needed = changes
    for key in changes:
        fewer = _without(needed, key)
        try:
            alike = _computed(source, resolve(source, fewer)) == computed
        except ConfigError:
            # Not a study without it.
            alike = False
        if alike:
            needed = fewer
    return sorted(f"{key}={format_value(value)}" for key, value in needed.items())


def named(study: str, said: list[str]) -> str:
    """The study's name, and behind an @ what is `said` of the trial: its hash where that cannot
    name a folder."""
    if not said:
        return study
    label = ",".join(said)
    if not LABEL.fullmatch(label):
        label = hashlib.sha256(label.encode()).hexdigest()[:10]
    return f"{study}@{label}"


def _computed(source: StudySource, variants: list[Variant]) -> list[str]:
    """What each variant computes with any one seed."""
    return [variant.cell(source.name, 0, source.study).fingerprint for variant in variants]


def _without(changes: Mapping, left_out: str) -> Mapping:
    fewer = Mapping(changes.at)
    for key, value in changes.items():
        if key != left_out:
            fewer.put(key, value, changes.where[key])
    return fewer
