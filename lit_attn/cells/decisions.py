"""Records of decisions about a study: its sealed plans, and looks at its results.

They stand beside the plan in the folder of the study (lit_attn.cells.records).
"""

import itertools
import json
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lit_attn.cells.records import Integer, Metric, Record, utc_now


class Seal(Record):
    """Decisions of a study at `time`; `hash` covers all other values but `results`."""

    time: str = Field(default_factory=utc_now, description="time in UTC, ISO 8601")
    results: Integer = Field(0, description="cells of the study that had a result at that time")
    hash: str
    variants: dict[str, str] = Field(description="identities of seed 0 by name, as written")
    baseline: str
    seeds: list[Integer]
    metric: Metric
    match: list[str]
    tune: dict[str, Any]
    exclude: list[dict[str, Any]]
    design: dict[str, Any] | None = Field(
        None, description="screening of a study with `design`, without the values and the choice"
    )

    @model_serializer(mode="wrap")
    def _leave_out_design(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the values; a seal of a study with `seeds` is written as in earlier versions."""
        content: dict[str, Any] = serialize(self)
        if self.design is None:
            content.pop("design", None)
        return content

    @property
    def decisions(self) -> dict[str, Any]:
        """Decisions by key, except variants and seeds."""
        decided = self.metric.decided
        metric = {f"metric.{key}": getattr(decided, key) for key in Metric.model_fields}
        keys = {"baseline", "match", "tune", "exclude"}
        return metric | self.model_dump(include=keys) | {"design": self.design}


class Seals(Record):
    """The plans of a study in the order of their first run."""

    entries: list[Seal] = Field(min_length=1)

    @property
    def seeds(self) -> list[int]:
        """Seeds of the last plan."""
        return self.entries[-1].seeds

    @property
    def is_before_results(self) -> bool:
        """True if the first plan was sealed before the first result."""
        return self.entries[0].results == 0

    @property
    def _late_changes(self) -> list[tuple[Seal, Seal]]:
        """Pairs (plan before, plan) for each plan that was sealed after results."""
        pairs = itertools.pairwise(self.entries)
        return [(before, plan) for before, plan in pairs if plan.results > 0]

    @property
    def added_seeds(self) -> list[tuple[int, ...]]:
        """Seeds of each extension that came after results; one entry is one further look."""
        extensions = []
        for before, plan in self._late_changes:
            added = set(plan.seeds) - set(before.seeds)
            if added:
                extensions.append(tuple(sorted(added)))
        return extensions

    def changes(self) -> dict[str, list[str]]:
        """Return the decisions that changed after results, by kind; added seeds are looks."""
        added_variants: set[str] = set()
        removed_variants: set[str] = set()
        removed_seeds: set[int] = set()
        changed_decisions: list[str] = []
        for before, plan in self._late_changes:
            # A variant whose identity has changed counts as added.
            for name, identity in plan.variants.items():
                if before.variants.get(name) != identity:
                    added_variants.add(name)
            removed_variants |= before.variants.keys() - plan.variants.keys()
            removed_seeds |= set(before.seeds) - set(plan.seeds)
            new_decisions = plan.decisions
            for key, value in before.decisions.items():
                change = f"{key} (before: {json.dumps(value)})"
                if value != new_decisions[key] and change not in changed_decisions:
                    changed_decisions.append(change)
        # A seed that a later plan has again is not removed.
        removed_seeds -= set(self.seeds)
        return {
            "added_variants": sorted(added_variants),
            "removed_variants": sorted(removed_variants),
            "removed_seeds": [str(seed) for seed in sorted(removed_seeds)],
            "changed_decisions": changed_decisions,
        }


class Look(Record):
    """Results of a running study that were shown: after `seeds` of `planned` seeds."""

    seeds: Integer
    planned: Integer
    time: str = Field(default_factory=utc_now, description="time in UTC, ISO 8601")


class Looks(Record):
    """Looks at a running study at which a variant could have had a verdict, oldest first."""

    entries: list[Look]

    def has_any(self, planned: int) -> bool:
        """Return True if there was a look at a plan of `planned` seeds."""
        return any(look.planned == planned for look in self.entries)
