"""Statistics for frames of any program, and the readers of other programs' results."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers.fake_study import accuracy_of

from lit_attn.report import compare, read_runs
from lit_attn.report.comparison import compare_variants
from lit_attn.report.table_input import read_table
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
    result = compare(frame, margin=0.01).set_index("variant")
    assert result["verdict"].to_dict() == {
        "standard": "baseline",
        "good": "better",
        "same": "equivalent",
    }
    frame.to_csv(tmp_path / "results.csv", index=False)
    (study,) = read_table(tmp_path / "results.csv")
    record = compare_variants(study).records["good"]
    good = result.loc["good"]
    assert good["difference"] == record["difference"]
    assert good["p_corrected"] == record["p_adjusted"]
    assert (good["low"], good["high"]) == (record["low"], record["high"])
    assert good["seeds_low"] <= good["seeds_high"]


def test_baseline_goal_and_margin_can_be_named() -> None:
    frame = make_frame().rename(columns={"accuracy": "cost"})
    verdicts = compare(frame, "cost", baseline="good", goal="min").set_index("variant")["verdict"]
    assert verdicts.to_dict() == {"standard": "better", "good": "baseline", "same": "better"}


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"variant": "model"}, {}, "has no column 'variant'"),
        ({}, {"metric": "acuracy"}, "has no numeric column 'acuracy'; did you mean 'accuracy'"),
        ({}, {"baseline": "standrd"}, "no variant 'standrd'; did you mean 'standard'"),
        ({}, {"margin": 0.0}, "margin: needs a number above 0"),
    ],
)
def test_a_mistake_is_one_line(
    change: dict[str, str], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(make_frame().rename(columns=change), **arguments)


def test_two_metrics_must_be_chosen_from() -> None:
    with pytest.raises(ConfigError, match="name the metric: accuracy, loss"):
        compare(make_frame().assign(loss=1.0))


@pytest.mark.process
def test_a_comparison_needs_no_torch(tmp_path: Path) -> None:
    make_frame().to_csv(tmp_path / "results.csv", index=False)
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'lightning', 'timm', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import pandas as pd\n"
        "from lit_attn.report import compare\n"
        f"frame = pd.read_csv({str(tmp_path / 'results.csv')!r})\n"
        "print(compare(frame).verdict.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['baseline', 'better', 'undecided']\n"


def list_runs() -> list[tuple[str, str, int, float]]:
    """Return name, variant, seed and accuracy of every run."""
    rows = make_frame().itertuples(index=False)
    return [(f"{row.variant}-seed{row.seed}", row.variant, row.seed, row.accuracy) for row in rows]


def write_wandb_csv(folder: Path) -> Path:
    path = folder / "runs.csv"
    rows = [(name, "finished", variant, seed, value) for name, variant, seed, value in list_runs()]
    columns = ["Name", "State", "attention", "seed", "accuracy"]
    pd.DataFrame(rows, columns=columns).to_csv(path, index=False)
    return path


def write_wandb_json(folder: Path) -> Path:
    runs = []
    for name, variant, seed, value in list_runs():
        config = {"attention": {"value": variant, "desc": None}, "seed": seed, "_wandb": {}}
        history = [{"_step": 1, "accuracy": 0.1}, {"_step": 2, "accuracy": value}]
        runs.append({"name": name, "config": json.dumps(config), "history": history})
    path = folder / "runs.json"
    path.write_text(json.dumps(runs))
    return path


def write_mlruns(folder: Path) -> Path:
    for number, (name, variant, seed, value) in enumerate(list_runs()):
        run = folder / "mlruns" / "1" / f"run{number}"
        for part in ("params", "metrics"):
            (run / part).mkdir(parents=True)
        (run / "meta.yaml").write_text(f"run_name: {name}\n")
        (run / "params" / "attention").write_text(variant)
        (run / "params" / "seed").write_text(str(seed))
        (run / "metrics" / "accuracy").write_text(f"1 0.1 1\n2 {value!r} 2\n")
    return folder / "mlruns"


def write_mlflow(folder: Path) -> Path:
    path = folder / "mlflow.db"
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE runs (run_uuid, name, lifecycle_stage, start_time);"
            "CREATE TABLE params (key, value, run_uuid);"
            "CREATE TABLE latest_metrics (key, value, is_nan, run_uuid);"
        )
        for name, variant, seed, value in list_runs():
            database.execute("INSERT INTO runs VALUES (?, ?, 'active', 0)", (name, name))
            for key, text in (("attention", variant), ("seed", str(seed))):
                database.execute("INSERT INTO params VALUES (?, ?, ?)", (key, text, name))
            database.execute(
                "INSERT INTO latest_metrics VALUES ('accuracy', ?, 0, ?)", (value, name)
            )
    database.close()
    return path


def write_trackio(folder: Path) -> Path:
    path = folder / "project.db"
    with sqlite3.connect(path) as database:
        database.executescript(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics);"
            "CREATE TABLE configs (id INTEGER PRIMARY KEY, run_name, config, created_at);"
        )
        add_metrics = "INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)"
        for name, variant, seed, value in list_runs():
            settings = json.dumps({"attention": variant, "seed": seed, "_Created": ""})
            add_settings = "INSERT INTO configs (run_name, config) VALUES (?, ?)"
            database.execute(add_settings, (name, settings))
            database.execute(add_metrics, (name, 2, json.dumps({"accuracy": value})))
            database.execute(add_metrics, (name, 1, json.dumps({"accuracy": 0.1})))
    database.close()
    return path


@pytest.mark.parametrize(
    "write", [write_wandb_csv, write_wandb_json, write_mlruns, write_mlflow, write_trackio]
)
def test_runs_of_other_programs_become_a_frame(write: object, tmp_path: Path) -> None:
    frame = read_runs(write(tmp_path), variant="attention")
    assert list(frame)[:3] == ["run", "variant", "seed"]
    expected = make_frame().set_index(["variant", "seed"])["accuracy"]
    values = frame.set_index(["variant", "seed"])["accuracy"]
    pd.testing.assert_series_equal(values.sort_index(), expected.sort_index())
    result = compare(frame, "accuracy", baseline="standard").set_index("variant")
    assert result.loc["good", "verdict"] == "better"


def test_folders_of_tensorboard_have_the_seed_in_their_names(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for variant, seed in (("standard", 0), ("standard", 1), ("good", 0), ("good", 1)):
        writer = EventFileWriter(str(tmp_path / variant / str(seed)))
        for step, value in enumerate((0.1, seed + 0.5)):
            summary = Summary(value=[Summary.Value(tag="test/accuracy", simple_value=value)])
            writer.add_event(Event(step=step, wall_time=1.0, summary=summary))
        writer.close()
    frame = read_runs(tmp_path)
    rows = frame[["variant", "seed", "test/accuracy"]].to_dict("split")["data"]
    assert sorted(rows) == [
        ["good", 0, 0.5],
        ["good", 1, 1.5],
        ["standard", 0, 0.5],
        ["standard", 1, 1.5],
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("runs.csv", "run,accuracy\na,1\n", "has no column 'name'"),
        ("runs.csv", "name,accuracy\nbase,1\n", "run 'base' has no setting 'seed'"),
        ("runs.json", "{", "cannot be read as JSON"),
        ("runs.json", "[{}]", "run 0 has no name"),
        ("runs.db", "no database", "cannot be read as SQLite"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_runs(path)


def test_a_missing_path_and_an_empty_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_runs(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="contains neither event files nor runs of MLflow"):
        read_runs(tmp_path)
    with pytest.raises(ConfigError, match="no run has a setting 'atention'"):
        read_runs(write_wandb_csv(tmp_path), variant="atention")
