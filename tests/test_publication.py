"""Nothing private leaves this machine: exports, reports, event files, seals, trackers."""

import json
import socket
from pathlib import Path

import pytest
from helpers import studies
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_attn.__main__ import main
from lit_attn.ablate.plan import expand
from lit_attn.config.training import MLflowLogger
from lit_attn.hub import load_exported
from lit_attn.report import write_reports
from lit_attn.schema.publish import REMOVED, has_secret, hide_in_text, hide_private, is_secret_key
from lit_attn.train import run_cell
from lit_attn.training.fit import _settings

USER, KEY, HOST = "alice-planted", "hf-planted-key", "host-planted.example"

EXPERIMENT = """\
task: language-modelling
data: {{kind: text, name: "{name}", train: {folder}/train.txt, test: {folder}/test.txt,
       context: 8, batch_size: 4, epoch_steps: 2}}
model: {{kind: gpt, dim: 8, depth: 1, heads: 2, ffn: {{width: 8}}}}
optimizer: {{kind: adamw, lr: 1e-3}}
training: {{epochs: 1, accelerator: cpu}}
"""


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("/home/alice/x.csv", "x.csv"), ("~/x", "x"), ("~alice/x", "x"), ("../alice/x", "x"),
        ("a/../alice/x", "x"), ("./alice/x", "x"), ("file:///home/alice/x", "x"),
        ("file:/home/alice/x", "x"), ("s3://KEY:SECRET@bucket/x", "x"), ("gs://alice/x/", "x"),
        ("https://host.alice.org/x?token=SECRET", "x"), ("alice@host:/data/x", "x"),
        ("C:\\Users\\alice\\x", "x"), ("\\\\server\\alice\\x", "x"), ("/mnt/alice smith/x", "x"),
        ("postgresql://alice:SECRET@host/x", "x"), ("sqlite:////home/alice/x", "x"),
        ("/home/alice", REMOVED), ("/Users/alice/", REMOVED), ("~alice", REMOVED),
        ("https://alice.org", REMOVED), ("s3://KEY:SECRET@bucket", REMOVED),
        ("KEY:SECRET@host", REMOVED), ("pixels of /home/alice/x, y", "pixels of x, y"),
        ("root=~/alice/x", "root=x"), ("'/home/alice/x'", "'x'"),
    ],
)  # fmt: skip
def test_of_a_path_or_an_address_only_the_last_name_is_published(text: str, published: str) -> None:
    assert hide_in_text(text) == published
    assert hide_private({"a": [{"b": (text,)}]}) == {"a": [{"b": [published]}]}


@pytest.mark.parametrize(
    "text",
    ["", "x", "org/name", "hf-hub:org/name", "mine:Net", "lr=1e-3", "test/accuracy", "a / b", "~",
     "IoU:wall", "and/or", "1/2", "q·k + z·z", "x.y/z.w", "loss (nats)"],
)  # fmt: skip
def test_other_texts_stay(text: str) -> None:
    assert hide_in_text(text) == text


@given(
    folders=st.lists(st.text("abc ._-", min_size=1, max_size=5), max_size=3),
    start=st.sampled_from(
        ["/", "~/", "../", "./", "file:///", "s3://K:S@", "C:\\", "\\\\", "~/.."]
    ),
    around=st.sampled_from(["{}", "see {}", "x={}", '"{}"']),
)
@settings(max_examples=100, deadline=None)
def test_no_folder_of_a_path_is_published(folders: list[str], start: str, around: str) -> None:
    separator = "\\" if "\\" in start else "/"
    words = [word.replace(" ", "") or "a" for word in folders]
    text = around.format(start + separator.join([*words, USER, "file"]))
    assert USER not in hide_in_text(text)
    assert "S@" not in hide_in_text(text)


def test_values_of_secret_keys_are_removed() -> None:
    for key in ("token", "api_key", "hubToken", "HF_TOKEN", "password", "aws_secret", "accessKey"):
        assert is_secret_key(key)
        assert hide_private({"arguments": {key: KEY}}) == {"arguments": {key: REMOVED}}
    values = {"tokens": "x", "tokenizer": "gpt2", "key": "x", "class_token": True, "token": 3}
    assert hide_private(values) == values


def test_a_tracker_with_a_password_is_refused_without_printing_it(tmp_path: Path) -> None:
    for uri in ("http://alice:SECRET@host", "https://SECRET@host", "mysql://a:SECRET@host/db",
                "http://host?api_key=SECRET", "http://[SECRET@host"):  # fmt: skip
        assert has_secret(uri)
        tracker = f"{{kind: mlflow, uri: '{uri}'}}"
        body = f"baseline: a\ncells: {{a: {{}}}}\nset: {{training.loggers: [{tracker}]}}"
        with pytest.raises(ValueError, match="contains a password or token") as caught:
            expand(studies.study(tmp_path, body), tmp_path / "runs")
        assert "SECRET" not in str(caught.value)
    for uri in ("http://host:5000", "sqlite:////x/mlflow.db", "postgresql://alice@host/db", "x"):
        assert MLflowLogger(uri=uri).uri == uri


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study that has run, whose data are in the folder of a user."""
    folder = tmp_path_factory.mktemp("study")
    for user in (USER, f"{USER}-2"):
        data = folder / user / "data"
        data.mkdir(parents=True)
        for name in ("train", "test"):
            (data / f"{name}.txt").write_text("Some text to learn from. " * 40)
    home = folder / USER / "data"
    experiment = EXPERIMENT.format(folder=home, name=f"files of {home}")
    other = folder / f"{USER}-2" / "data" / "train.txt"
    tracker = f"{{kind: mlflow, uri: 'sqlite:///{folder}/{USER}/mlflow.db'}}"
    body = (
        f"baseline: a\nseeds: 1\nmatch: none\nmetric: {{name: test/loss}}\n"
        f"set: {{training.loggers: [{tracker}]}}\n"
        f"cells: {{a: {{}}, b: {{data.train: {other}, data.name: {other}}}, "
        "c: {attention: xsa}}\n"
    )
    path = studies.write(folder, body, experiment)
    path.write_text(path.read_text().replace("    seeds: 2\n", ""))
    matrix = expand(studies.read_studies(path)["tiny"], folder / "runs")
    matrix.write_plan()
    for job in matrix.jobs:
        job.folder.mkdir(parents=True)
        plain = job.cell.experiment.training.model_copy(update={"loggers": ()})
        experiment_config = job.cell.experiment.model_copy(update={"training": plain})
        # The tracker is not contacted in this test.
        job.cell.model_copy(update={"experiment": experiment_config}).write(
            job.folder / "config.yaml"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: HOST)
            run_cell(job.folder)
        job.write_config()
        settings_text = json.dumps(_settings(job.cell))
        assert USER not in settings_text
        assert "mlflow" not in settings_text
    (folder / "seal.json").write_text(matrix.seal([0]).model_dump_json())
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def require_nothing_private(contents: dict[str, bytes]) -> None:
    private = [USER, KEY, HOST, "mlflow.db"]
    for name, content in contents.items():
        for word in private:
            assert word not in name
            assert word.encode() not in content, (name, word)


def test_an_export_contains_nothing_private(folder: Path, tmp_path: Path) -> None:
    for cell in (folder / "runs" / "tiny").glob("*/0-*"):
        out = tmp_path / cell.parent.name
        assert main(["export", "hub", str(cell), f"--out={out}"]) == 0
        require_nothing_private(read_tree(out))
        load_exported(out)


def test_event_files_contain_nothing_private(folder: Path) -> None:
    events = {path.name: path.read_bytes() for path in folder.rglob("events.out.tfevents.*")}
    assert len(events) == 3
    require_nothing_private(events)
    assert all(b"train.txt" in content for content in events.values())


def test_a_report_and_a_seal_contain_nothing_private(folder: Path, tmp_path: Path) -> None:
    write_reports(folder / "runs", tmp_path / "reports")
    require_nothing_private(read_tree(tmp_path / "reports"))
    require_nothing_private({"seal.json": (folder / "seal.json").read_bytes()})


def test_values_of_a_search_are_sealed_without_folders(tmp_path: Path) -> None:
    tune = f"{{data.path: [/home/{USER}/x, /home/{USER}/y], select: val/loss, seeds: [9]}}"
    data = "{kind: npz, name: mine, path: a, size: 8, channels: 1, classes: 2, validation: 10}"
    body = f"baseline: a\ncells: {{a: {{}}}}\ntune: {tune}"
    source = studies.study(tmp_path, body, studies.with_data(data))
    sealed = json.loads(expand(source, tmp_path / "runs").seal([0, 1]).model_dump_json())
    assert sealed["tune"]["data.path"] == ["x", "y"]
