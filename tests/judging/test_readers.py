"""Readers of the runs of other programs, on files that these programs wrote."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_attn import judge, read_runs
from lit_attn.judging.table import read_table
from lit_attn.report.answers.judged import JudgedStudy
from lit_attn.schema.errors import ConfigError

RUNS = [("a", 0, 0.90), ("a", 1, 0.91), ("a", 2, 0.92), ("b", 0, 0.80), ("b", 1, 0.82)]
"""Variant, seed and last accuracy of five runs."""


def find_values(judged: JudgedStudy) -> dict[str, tuple[int, float | None]]:
    """Return number and mean of the values of every variant."""
    values = {judged.baseline: judged.baseline_values}
    values |= {variant.variant: variant.values for variant in judged.variants}
    return {
        name: (entry.n, None if entry.mean is None else round(entry.mean, 6))
        for name, entry in values.items()
    }


EXPECTED = {"a": (3, 0.91), "b": (2, 0.81)}


@pytest.fixture
def quiet_mlflow() -> Iterator[None]:
    """Ignore what mlflow and sqlalchemy warn about in their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def log_mlflow(address: str, experiment: str = "attention", shift: int = 0) -> list[str]:
    """Log RUNS with real mlflow, three values without a step each, and return the ids."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=address)
    number = client.create_experiment(experiment)
    ids = []
    for variant, seed, value in RUNS:
        run = client.create_run(number, run_name=f"{variant}-{seed}")
        ids.append(run.info.run_id)
        client.log_param(ids[-1], "attention", variant)
        client.log_param(ids[-1], "seed", seed + shift)
        for logged in (0.1, 0.5, value):
            client.log_metric(ids[-1], "accuracy", logged)
        client.set_terminated(ids[-1])
    return ids


def find_address(kind: str, folder: Path) -> tuple[Path, str]:
    if kind == "files":
        return folder / "mlruns", (folder / "mlruns").as_uri()
    return folder / "ml.db", f"sqlite:///{folder / 'ml.db'}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "sqlite"])
def test_mlflow_is_read_through_its_own_search(
    kind: str, tmp_path: Path, quiet_mlflow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of equal steps counts; deleted, failed and running runs are not finished ones."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    path, address = find_address(kind, tmp_path)
    ids = log_mlflow(address)
    client = MlflowClient(tracking_uri=address)
    number = client.get_run(ids[0]).info.experiment_id
    for state, seed in (("FAILED", 3), ("RUNNING", 4), ("deleted", 5)):
        run = client.create_run(number, run_name=f"b-{seed}").info.run_id
        client.log_param(run, "attention", "b")
        client.log_param(run, "seed", seed)
        client.log_metric(run, "accuracy", 0.01)
        if state == "FAILED":
            client.set_terminated(run, "FAILED")
        if state == "deleted":
            client.delete_run(run)
    judged = judge(path, "accuracy", pairs="none", variant="attention", baseline="a")
    assert find_values(judged) == EXPECTED
    (variant,) = judged.variants
    assert (variant.seeds.failed, variant.seeds.planned, variant.is_final) == (1, 4, False)
    assert "Left out: 1 deleted run of MLflow." in judged.notes
    assert "Failed: 1 run with the state 'FAILED', whatever the value." in judged.notes


@pytest.mark.slow
def test_two_experiments_are_not_merged(tmp_path: Path, quiet_mlflow: None) -> None:
    path, address = find_address("sqlite", tmp_path)
    log_mlflow(address, "short")
    log_mlflow(address, "long", shift=10)
    choices: dict[str, Any] = {"pairs": "seed", "variant": "attention", "baseline": "a"}
    with pytest.raises(ConfigError, match="2 values of 'experiment'"):
        judge(path, "accuracy", **choices)
    judged = judge(path, "accuracy", where=["experiment=long"], **choices)
    assert find_values(judged) == EXPECTED


def test_a_file_of_another_sqlite_program_is_left_as_it_is(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "other.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE notes (text)")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"other.db: is no file of MLflow; name a function"):
        judge(path, "accuracy", pairs="none")
    assert path.read_bytes() == before


def write_wandb(folder: Path, **changes: Any) -> Path:
    """Write RUNS as the API of W&B returns them, with `changes` of the first run."""
    runs = []
    for variant, seed, value in RUNS:
        history = [
            {"_step": 2, "accuracy": value, "loss": None},
            {"_step": 0, "accuracy": 0.1, "loss": 2.0},
            {"_step": 3, "accuracy": None, "loss": "NaN"},
        ]
        config = {"attention": {"value": variant, "desc": None}, "seed": seed, "_wandb": {}}
        run = {"name": f"{variant}-{seed}", "state": "finished", "config": json.dumps(config)}
        runs.append(run | {"history": history})
    runs[0] |= changes
    path = folder / "runs.json"
    path.write_text(json.dumps(runs))
    return path


def test_a_history_of_wandb_has_the_last_value_by_step(tmp_path: Path) -> None:
    """A row has None where nothing was logged, and rows can stand in any order."""
    path = write_wandb(tmp_path)
    judged = judge(path, "accuracy", pairs="seed", variant="attention", baseline="a")
    assert find_values(judged) == EXPECTED
    assert set(read_runs(path)["loss"]) == {"NaN"}


def test_a_summary_of_wandb_replaces_its_history(tmp_path: Path) -> None:
    path = write_wandb(tmp_path, summary={"accuracy": 0.99, "loss": None})
    assert read_runs(path)["accuracy"].tolist()[0] == 0.99


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "{damaged"}, "runs.json: run 1: config: cannot be read as JSON"),
        ({"history": {"a": 1}}, "runs.json: run 1: history: is no list of logged rows"),
        ({"history": [{"_step": "last", "accuracy": 1}]}, r"history: _step: 'last' is no number"),
        ({"config": [1]}, "runs.json: run 1: config: is no mapping of names to values"),
        ({"summary": "5"}, "runs.json: run 1: summary: is no mapping of names to values"),
        ({"state": "crashed"}, None),
    ],
)
def test_a_damaged_run_of_wandb_is_one_line(
    change: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    path = write_wandb(tmp_path, **change)
    choices: dict[str, Any] = {"pairs": "none", "variant": "attention", "baseline": "a"}
    if message is None:
        assert judge(path, "accuracy", **choices).baseline_values.n == 2
    else:
        with pytest.raises(ConfigError, match=message):
            judge(path, "accuracy", **choices)


def test_a_table_exported_by_wandb_keeps_names_and_states(tmp_path: Path) -> None:
    path = tmp_path / "wandb.csv"
    path.write_text(
        '"Name","State","seed","accuracy"\n"null","finished","0","0.9"\n'
        '"null","finished","1","0.8"\n"None","crashed","0","0.1"\n"None","running","1","0.2"\n'
    )
    judged = judge(path, "accuracy", pairs="seed", variant="Name", baseline="null")
    assert find_values(judged) == {"null": (2, 0.85), "None": (0, None)}
    (variant,) = judged.variants
    assert (variant.seeds.failed, variant.is_final) == (1, False)


def write_events(folder: Path, style: str, steps: list[tuple[int, float]]) -> None:
    """Write scalars as tensorboard does: of the old style, or as tensors of the new one."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    writer = EventFileWriter(str(folder))
    for step, value in steps:
        if style == "old":
            entry = Summary.Value(tag="accuracy", simple_value=value)
        else:
            metadata = create_summary_metadata(display_name="", description="")
            entry = Summary.Value(
                tag="accuracy", tensor=make_tensor_proto(value), metadata=metadata
            )
        writer.add_event(Event(step=step, wall_time=step + 1.0, summary=Summary(value=[entry])))
    writer.close()


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write what `add_hparams` writes, in a folder below that of the run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from torch.utils.tensorboard.summary import hparams

    writer = EventFileWriter(str(folder))
    _, start, _ = hparams(settings, {})
    writer.add_event(Event(step=0, wall_time=1.0, summary=start))
    writer.close()


@pytest.mark.parametrize("style", ["old", "new"])
def test_scalars_of_tensorboard_of_both_styles_are_read(style: str, tmp_path: Path) -> None:
    for variant, seed, value in RUNS:
        write_events(tmp_path / variant / str(seed), style, [(0, 0.1), (9, 0.5), (9, value)])
    judged = judge(tmp_path, "accuracy", pairs="seed", variant="Name", baseline="a", cut_seed=True)
    assert find_values(judged) == EXPECTED


def test_hparams_of_tensorboard_are_settings_of_their_run(tmp_path: Path) -> None:
    for variant, seed, value in RUNS:
        run = tmp_path / f"{variant}-{seed}"
        write_events(run, "old", [(0, value)])
        write_settings(run / "1795731177", {"attention": variant, "seed": seed})
    judged = judge(tmp_path, "accuracy", pairs="seed", variant="attention", baseline="a")
    assert find_values(judged) == EXPECTED
    assert "5 folders of add_hparams belong to the runs above them." in judged.notes


def test_a_restart_in_the_same_folder_is_said(tmp_path: Path) -> None:
    write_events(tmp_path / "a-0", "old", [(0, 0.1), (9, 0.9)])
    write_events(tmp_path / "a-0", "old", [(0, 0.1), (2, 0.52)])
    write_events(tmp_path / "b-0", "old", [(0, 0.1), (9, 0.8)])
    judged = judge(tmp_path, "accuracy", pairs="none", variant="Name", baseline="b-0")
    assert find_values(judged)["a-0"] == (1, 0.52)
    assert "1 run started again at an earlier step (a-0)" in judged.notes[0]


def write_samples(folder: Path, model: str, scores: list[float], time: str = "01") -> None:
    """Write scores as `lm_eval --log_samples` does."""
    path = folder / model / f"samples_arc_easy_2026-01-{time}T10-00-00.123456.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, score in enumerate(scores):
        entry = {"doc_id": number, "doc": {}, "target": "x", "arguments": {}, "resps": [[""]]}
        entry |= {"filtered_resps": [""], "filter": "none", "metrics": ["acc"], "acc": score}
        lines.append(json.dumps(entry))
    path.write_text("\n".join(lines) + "\n")


def test_the_newer_samples_of_a_model_are_those_with_the_later_time(tmp_path: Path) -> None:
    """The path of the older file is the later one in alphabetical order."""
    write_samples(tmp_path / "a", "mine", [1.0] * 9, time="02")
    write_samples(tmp_path / "b", "mine", [0.0] * 9, time="01")
    write_samples(tmp_path, "base", [0.0] * 8 + [1.0])
    judged = judge(tmp_path, "acc:max", pairs="seed", baseline="base")
    assert find_values(judged)["mine"] == (9, 1.0)
    write_samples(tmp_path / "c", "mine", [0.0] * 9, time="02")
    with pytest.raises(ConfigError, match=r"has the model 'mine' and the task 'arc_easy' of"):
        judge(tmp_path, "acc:max", pairs="seed", baseline="base")


def test_samples_of_the_harness_are_paired_over_items(tmp_path: Path) -> None:
    items = 60
    write_samples(tmp_path, "old", [0.0] * items, time="01")
    write_samples(tmp_path, "base", [float(item % 3 == 0) for item in range(items)])
    # Right wherever the baseline is right, and on 12 further items.
    better = [float(item % 3 == 0 or item % 5 == 1) for item in range(items)]
    write_samples(tmp_path, "old", better, time="02")
    judged = judge(tmp_path, "acc:max", pairs="seed", baseline="base")
    (variant,) = judged.variants
    assert variant.difference is not None
    assert variant.difference.mean == pytest.approx(8 / 60)
    assert (variant.verdict, variant.seeds.pairs) == ("better", 60)
    assert re.search("is left out, because .*/samples_arc_easy_2026-01-02", judged.notes[0])


def test_items_in_another_order_are_the_same_items(tmp_path: Path) -> None:
    """A place in a list of items is no item: "undecided, p = .273", right is better, p = .008."""
    scores = [float(item % 3 == 0) for item in range(60)]
    better = [float(item % 3 == 0 or item % 7 == 1) for item in range(60)]
    for name, values, shift in (("base", scores, 0), ("mine", better, 17)):
        write_samples(tmp_path, name, values[shift:] + values[:shift])
        path = next((tmp_path / name).iterdir())
        lines = []
        for number, line in enumerate(path.read_text().splitlines()):
            item = (number + shift) % 60
            hashes = {"doc_hash": f"{item:064d}", "prompt_hash": f"{name} {item % 6}"}
            lines.append(json.dumps(json.loads(line) | hashes))
        path.write_text("\n".join(lines))
    judged = judge(tmp_path, "acc:max", pairs="seed", baseline="base")
    (variant,) = judged.variants
    assert variant.difference is not None
    assert variant.difference.mean == pytest.approx(sum(better) / 60 - sum(scores) / 60)
    assert (variant.verdict, variant.seeds.pairs) == ("better", 60)
    assert "The prompts of 60 items differ between models (prompt_hash)" in judged.notes[0]


def test_two_tasks_of_the_harness_are_not_merged(tmp_path: Path) -> None:
    write_samples(tmp_path, "base", [1.0, 0.0])
    path = next((tmp_path / "base").iterdir())
    path.with_name("samples_boolq_2026-01-01T10-00-00.123456.jsonl").write_text(path.read_text())
    with pytest.raises(ConfigError, match=r"2 values of 'task' .*--where task=arc_easy"):
        judge(tmp_path, "acc:max", pairs="seed", baseline="base")


READER = """
import re

def read(path):
    for log in sorted(path.glob("*/*.txt")):
        last = log.read_text().splitlines()[-1]
        loss, ms = re.search(r"val_loss:(\\S+) train_time:(\\d+)ms", last).groups()
        yield {"variant": log.parent.name, "val_loss": float(loss), "train_time_ms": int(ms)}
"""


def test_any_folder_is_read_by_ten_lines_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(READER)
    for variant, seed, value in RUNS:
        log = tmp_path / "logs" / variant / f"{seed}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"step:1/1 val_loss:{value} train_time:85993ms step_avg:58.10ms\n")
    reader = f"{tmp_path / 'mine.py'}:read"
    judged = judge(tmp_path / "logs", pairs="none", baseline="a", reader=reader)
    assert find_values(judged) == EXPECTED
    assert judged.baseline_cost.seconds_per_seed == pytest.approx(85.993)
    (tmp_path / "logs" / "b" / "0.txt").write_text("killed\n")
    with pytest.raises(ConfigError, match=r"mine.py:7: .*logs: AttributeError: 'NoneType'"):
        judge(tmp_path / "logs", pairs="none", baseline="a", reader=reader)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def read(path):\n    return 1 +\n", "read", r"mine.py:2: SyntaxError"),
        ("import nothing_there\n", "read", r"mine.py:1: ModuleNotFoundError"),
        ("", "read", "mine.py has no function 'read'"),
        ("def read(path):\n    yield 3\n", "read", "mine.py: yields int; a run is a mapping"),
        ("def read(path):\n    return []\n", "read", "contains no run"),
        ("", "", "write FILE.py:FUNCTION"),
    ],
)
def test_a_mistake_in_a_reader_is_one_line(
    text: str, name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_table(tmp_path, f"{tmp_path / 'mine.py'}:{name}")


def test_a_path_of_no_program_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: no such file or folder"):
        read_table(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is no folder of TensorBoard, MLflow or lm-evaluation"):
        read_table(tmp_path)
