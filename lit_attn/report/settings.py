"""Settings in which the variants of a study differ from the baseline."""

import html
import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
import yaml

from lit_attn.report.formats import html_table
from lit_attn.report.read import StudyRecord

COLUMNS = ["variant", "setting", "baseline", "value"]
UNSET = "\N{EM DASH}"


def make_settings_frame(study: StudyRecord) -> pd.DataFrame:
    """Return one row for each setting in which a variant's experiment differs from the baseline's.

    The settings are those of the `config.yaml` that the first cell of each variant recorded. A
    variant without a recorded configuration has no rows.
    """
    baseline = _read_settings(study, study.plan.baseline)
    rows = []
    for variant in study.plan.variants if baseline else ():
        settings = _read_settings(study, variant.name)
        for key in dict.fromkeys([*baseline, *settings]) if settings else ():
            pair = (baseline.get(key, UNSET), settings.get(key, UNSET))
            if pair[0] != pair[1]:
                rows.append((variant.name, key, *pair))
    return pd.DataFrame(rows, columns=COLUMNS)


def make_settings_table(settings: pd.DataFrame, baseline: str) -> str:
    """Return the settings frame as an HTML table in which a variant's name stands once."""
    rows = []
    previous = None
    for variant, *cells in settings.itertuples(index=False):
        name = "" if variant == previous else html.escape(variant)
        texts = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">{name}</th>{texts}</tr>')
        previous = variant
    headings = ["variant", "setting", f"value of {baseline}", "value of the variant"]
    title = "<strong>Settings in which a variant differs from the baseline.</strong>"
    sentences = [f"{title} All other settings are equal. {UNSET}: not set."]
    return html_table(headings, rows, sentences, "settings")


def _read_settings(study: StudyRecord, variant: str) -> dict[str, str]:
    """Return the experiment of a variant's first cell with a readable configuration, by key."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    folders = (cell.folder for cell in study.variant_cells(variant) if cell.folder)
    for folder in folders:
        try:
            text = (folder / "config.yaml").read_text(encoding="utf-8")
            config = yaml.load(text, loader)
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(config, dict) and isinstance(config.get("experiment"), dict):
            return dict(_flatten(config["experiment"], ""))
    return {}


def _flatten(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and printed values of nested mappings."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, default=str)
