"""Statistics for frames of any program."""

from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import accuracy_of

from lit_attn.judging.prepare import Choices, prepare
from lit_attn.judging.table import read_table
from lit_attn.report import compare
from lit_attn.report.verdicts.comparison import compare_variants
from lit_attn.schema.errors import ConfigError

EFFECTS = {"standard": 0.0, "good": 0.05, "same": 0.0}
SEEDS = range(8)


def make_frame() -> pd.DataFrame:
    """Return the accuracies of three variants with eight seeds."""
    rows = []
    for variant, effect in EFFECTS.items():
        rows += [(variant, seed, accuracy_of(effect, seed, variant)) for seed in SEEDS]
    return pd.DataFrame(rows, columns=["variant", "seed", "accuracy"])


def test_the_numbers_are_those_of_the_report(tmp_path: Path) -> None:
    frame = make_frame()
    result = compare(frame, pairs="seed", baseline="standard", margin=0.01).set_index("variant")
    assert result["verdict"].to_dict() == {
        "standard": "baseline",
        "good": "better",
        "same": "equivalent",
    }
    frame.to_csv(tmp_path / "results.csv", index=False)
    choices = Choices(pairs="seed", baseline="standard")
    study = prepare(read_table(tmp_path / "results.csv"), choices).study
    record = compare_variants(study).records["good"]
    good = result.loc["good"]
    assert good["difference"] == record["difference"]
    assert good["p_corrected"] == record["p_adjusted"]
    assert (good["low"], good["high"]) == (record["low"], record["high"])
    # A decided variant needs no more seeds.
    assert result["seeds_low"].isna().to_dict() == {"standard": True, "good": True, "same": True}


def test_baseline_goal_and_margin_can_be_named() -> None:
    frame = make_frame().rename(columns={"accuracy": "cost"})
    result = compare(frame, "cost", pairs="seed", baseline="good", goal="min")
    verdicts = result.set_index("variant")["verdict"]
    assert verdicts.to_dict() == {"standard": "better", "good": "baseline", "same": "better"}


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"variant": "model"}, {}, "there is no column 'variant'"),
        ({}, {"metric": "acuracy"}, "has no column 'acuracy'; did you mean 'accuracy'"),
        ({}, {"pairs": "seeds"}, "say with --pairs"),
        ({"seed": "run"}, {}, "there is no column 'seed'"),
        ({}, {"baseline": "standrd"}, "has no variant 'standrd'; did you mean 'standard'"),
        ({}, {"margin": 0.0}, "margin: needs a number above 0"),
    ],
)
def test_a_mistake_is_one_line(
    change: dict[str, str], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(
            make_frame().rename(columns=change),
            **{"pairs": "seed", "baseline": "standard", **arguments},
        )


def test_two_metrics_must_be_chosen_from() -> None:
    with pytest.raises(ConfigError, match=r"name the metric .* choose from accuracy, loss"):
        compare(make_frame().assign(loss=1.0), pairs="seed", baseline="standard")


def test_a_frame_with_a_missing_name_is_refused() -> None:
    frame = make_frame().replace({"variant": {"same": None}})
    with pytest.raises(ConfigError, match="frame: row 16: variant: is empty"):
        compare(frame, pairs="seed", baseline="standard")
