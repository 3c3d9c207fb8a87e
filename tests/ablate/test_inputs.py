"""Missing or wrong input files are one error line before the first cell starts."""

import io
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import studies
from helpers.commands import run_python
from helpers.runs import TIMEOUT, start_cli
from PIL import Image

from lit_attn.ablate.__main__ import main
from lit_attn.ablate.dry_run import has_files
from lit_attn.ablate.input_files import require_inputs
from lit_attn.ablate.model_check import find_variants
from lit_attn.ablate.plan import expand
from lit_attn.data.text.labelled import LabelledText
from lit_attn.schema.errors import ConfigError
from lit_attn.segmentation.label_masks import list_pairs
from lit_attn.training.first_step import find_mistake

BODY = "baseline: a\ncells: {a: {}, b: {attention: belief2}}"
NPZ = "{kind: npz, path: mine.npz, name: m, size: 8, channels: 1, classes: 2}"
GIVEN = "name: mine, size: 8, channels: 1, classes: 3, batch_size: 4"


def write_npz(path: Path, **changes: np.ndarray | None) -> None:
    """Write six training and three test images of three classes."""
    arrays: dict[str, Any] = {
        "x_train": np.zeros((6, 8, 8), np.uint8),
        "y_train": np.arange(6) % 3,
        "x_test": np.zeros((3, 8, 8), np.uint8),
        "y_test": np.arange(3),
    }
    np.savez_compressed(path, **{k: v for k, v in (arrays | changes).items() if v is not None})


def write_classes(root: Path, count: int, second: str = "test") -> None:
    for split in ("train", second):
        for number in range(count):
            folder = root / split / f"class{number}"
            folder.mkdir(parents=True)
            for image in range(2):
                Image.new("L", (8, 8)).save(folder / f"{image}.png")


def check_data(folder: Path, data: str) -> str:
    """Return the error message about `data` without its file and line, or an empty string."""
    experiment = studies.with_data(data)
    matrix = expand(studies.study(folder, BODY, experiment), folder / "runs")
    error_line = ""
    try:
        require_inputs([matrix], matrix.jobs)
        ((study, variant, job), _) = find_variants([matrix], matrix.jobs)
        if mistake := find_mistake([job.config]):
            raise variant.error(study, mistake[1])
    except ConfigError as error:
        error_line = str(error)
    place = f"{folder / 'experiment.yaml'}:1: tiny: variant 'a': "
    assert not error_line or (error_line.startswith(place) and "\n" not in error_line)
    return error_line.removeprefix(place)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"y_train": np.arange(6)}, "data.classes: 3, but train has the labels 0 to 5; set 6"),
        ({"y_train": np.zeros(5, int)}, "data.path: {}: train has 6 images and 5 labels"),
        ({"x_test": np.zeros((3, 9, 9), np.uint8)}, "data.path: {}: test images are (1, 9, 9)"),
        ({"x_test": np.zeros((3, 8, 8))}, "data.path: {}: x_test must be uint8 of (N, H, W, C)"),
        ({"y_test": None}, "data.path: {}: has no 'y_test'; it has x_train"),
        (
            {"x_train": np.zeros((3, 8, 8), np.uint8), "y_train": np.arange(3)},
            "data.batch_size: 4 is more than the 3 samples of an epoch; 3 at most",
        ),
    ],
)
def test_contents_of_an_npz_file_are_checked(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "mine.npz"
    write_npz(path, **changes)
    error_line = check_data(tmp_path, f"{{kind: npz, path: {path}, {GIVEN}}}")
    assert error_line.startswith(message.format(path))
    assert bool(error_line) == bool(message)


def test_a_missing_or_torn_npz_file_is_one_error_line(tmp_path: Path) -> None:
    error_line = check_data(tmp_path, f"{{kind: npz, path: {tmp_path}/none.npz, {GIVEN}}}")
    assert error_line.startswith(f"data.path: no file {tmp_path}/none.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04")
    error_line = check_data(tmp_path, f"{{kind: npz, path: {tmp_path}/torn.npz, {GIVEN}}}")
    assert error_line.startswith(f"data.path: {tmp_path}/torn.npz: cannot be read as .npz: ")


def test_folders_shards_and_texts_have_a_batch(tmp_path: Path) -> None:
    write_classes(tmp_path / "images", 3)
    picture = (tmp_path / "images/train/class0/0.png").read_bytes()
    for split in ("train", "test"):
        (tmp_path / "shards" / split).mkdir(parents=True)
        with tarfile.open(tmp_path / "shards" / split / "0.tar", "w") as shard:
            for number in range(4):
                for ending, content in (("png", picture), ("cls", b"2")):
                    member = tarfile.TarInfo(f"{number}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    rest = "name: mine, size: 8, classes: 3"
    for kind, folder, count in (("image-folder", "images", 6), ("webdataset", "shards", 4)):
        data = f"{{kind: {kind}, path: {tmp_path / folder}, {rest}, batch_size: {count}}}"
        assert check_data(tmp_path, data) == ""
        more = data.replace(f"batch_size: {count}", f"batch_size: {count + 1}")
        line = f"data.batch_size: {count + 1} is more than the {count} samples of an epoch; "
        assert check_data(tmp_path, more) == f"{line}{count} at most"
    fewer = data.replace("classes: 3", "classes: 2")
    assert "sample '0' needs an image" in check_data(tmp_path, fewer)
    for split in ("train", "val", "test"):
        (tmp_path / f"{split}.tsv").write_text("0\ta\n1\tb\n")
    text = LabelledText(name="t", folder=tmp_path, batch_size=3)
    with pytest.raises(ConfigError, match=r"^data\.batch_size: 3 is more than the 2 samples"):
        text.build(0, torch.device("cpu"))


def test_class_folders_are_counted(tmp_path: Path) -> None:
    images = tmp_path / "images"
    data = f"{{kind: image-folder, path: {images}, name: mine, size: 8, classes: 3, batch_size: 2}}"
    train = tmp_path / "images" / "train"
    assert check_data(tmp_path, data).startswith(f"data.path: no file {images}")
    images.mkdir()
    assert check_data(tmp_path, data) == f"data.path: no folder {images}/train"
    write_classes(images, 3, "val")
    assert check_data(tmp_path, data) == ""
    fewer = data.replace("classes: 3", "classes: 2")
    assert check_data(tmp_path, fewer).startswith(
        f"data.classes: 2, but {train} has images of 3 classes"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{kind: text, name: t, train: none.txt, context: 8}", "data.train: no file .*/none.txt"),
        (
            "{kind: text, name: t, train: experiment.yaml, tokenizer: {kind: gpt2, folder: none}}",
            "data.tokenizer.folder: no file .*/none",
        ),
        ("{kind: shards, name: t, folder: none, context: 8}", "data.folder: no file .*/none"),
        (
            "{kind: python-text, tokenizer: bytes, context: 8}",
            "",
        ),
    ],
)
def test_text_files_must_exist(tmp_path: Path, data: str, message: str) -> None:
    model = "{kind: gpt, dim: 16, depth: 1, heads: 2, ffn: {width: 32}}"
    body = BODY + "\nmetric: {name: val/loss, goal: min, scale: 1}"
    experiment = "\n".join(
        ["task: language-modelling", f"data: {data}", f"model: {model}",
         *studies.EXPERIMENT.split("\n")[2:]]
    )  # fmt: skip
    matrix = expand(studies.study(tmp_path, body, experiment), tmp_path / "runs")
    if not message:
        require_inputs([matrix], matrix.jobs)
        return
    with pytest.raises(ConfigError, match=f"experiment.yaml:2: tiny: variant 'a': {message}"):
        require_inputs([matrix], matrix.jobs)


def test_the_folder_around_ade20k_is_recognised(tmp_path: Path) -> None:
    """`data.root` is the folder itself, not its parent."""
    inside = tmp_path / "ADEChallengeData2016"
    for kind in ("images", "annotations"):
        for split in ("training", "validation"):
            (inside / kind / split).mkdir(parents=True)
            suffix = "jpg" if kind == "images" else "png"
            (inside / kind / split / f"street.{suffix}").touch()
    assert len(list_pairs(inside, "training")) == 1
    with pytest.raises(ConfigError, match=r"^data\.root: .*; did you mean .*Data2016\?"):
        list_pairs(tmp_path, "training")


def test_finished_cells_need_no_data(tmp_path: Path) -> None:
    data = f"{{kind: npz, path: {tmp_path}/none.npz, {GIVEN}}}"
    experiment = studies.with_data(data)
    matrix = expand(studies.study(tmp_path, BODY, experiment), tmp_path / "runs")
    require_inputs([matrix], [])


@pytest.mark.process
def test_missing_data_starts_no_cell(tmp_path: Path) -> None:
    data = "{kind: image-folder, path: none, name: mine, size: 8, classes: 3}"
    experiment = studies.with_data(data)
    studies.write(tmp_path, BODY, experiment)
    with start_cli(tmp_path, "--set", "data.path=other") as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    place = "--set data.path=other: tiny: variant 'a': data.path: "
    assert output == f"{place}no file {tmp_path}/other\n"
    assert {path.name for path in tmp_path.iterdir()} == {"ablations.yaml", "experiment.yaml"}


@pytest.mark.process
def test_a_dry_run_tells_what_does_not_fit_in_data_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_npz(tmp_path / "mine.npz")
    data = f"{{kind: npz, path: mine.npz, {GIVEN}}}".replace("classes: 3", "classes: 2")
    experiment = studies.with_data(data)
    studies.write(tmp_path, BODY + "\n", experiment)
    monkeypatch.chdir(tmp_path)
    assert main(["ablations.yaml", "--dry-run"]) == 0
    place = "  warning: experiment.yaml:1: tiny: variant 'a': data.classes: 2, but train "
    assert place in capsys.readouterr().out
    # Data without files of the user are not read.
    matrix = expand(studies.study(tmp_path, BODY), tmp_path / "runs")
    assert not has_files(matrix.baseline.experiment.data)


@pytest.mark.process
def test_the_check_imports_no_lightning() -> None:
    """The checks read headers with modules that need no Lightning."""
    modules = "lit_attn.ablate.plan, lit_attn.data.sets, lit_attn.data.text.shards"
    code = f"import sys, {modules}; sys.exit('lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "body", "message"),
    [
        (
            studies.EXPERIMENT.replace("width: 32", "width: 1"),
            "baseline: a\ncells: {a: {}, b: {attention: mgk}}",
            r"ablations\.yaml:8: tiny: variant 'b': match: parameters: [0-9,]+ parameters with the",
        ),
        (
            studies.with_data(NPZ),
            BODY,
            r"experiment\.yaml:1: tiny: variant 'a': data\.classes: 2, but train .* to 2; set 3",
        ),
    ],
)
def test_a_mistake_that_needs_torch_starts_no_cell(
    tmp_path: Path, experiment: str, body: str, message: str
) -> None:
    write_npz(tmp_path / "mine.npz")
    studies.write(tmp_path, body, experiment)
    before = sorted(tmp_path.iterdir())
    done = run_python(tmp_path, "-m", "lit_attn.ablate", "ablations.yaml")
    # On a busy machine further lines show how far the check is.
    progress = r"(  [12] of [12]: .*\n)*"
    assert re.fullmatch(rf"checking the models and data of [12] variants\n{progress}", done.stdout)
    assert done.returncode == 2
    assert re.fullmatch(message + ".*\n", done.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_data_that_only_the_jobs_see_are_left_to_the_jobs(tmp_path: Path) -> None:
    """A submission checks the models, and the data whose files the login node sees."""
    matrix = expand(studies.study(tmp_path, BODY, studies.with_data(NPZ)), tmp_path / "runs")
    cells = [matrix.jobs[0].config]
    assert find_mistake(cells, has_data=False) is None
    mistake = find_mistake(cells)
    assert mistake is not None
    assert mistake[1].startswith("data")
    write_npz(tmp_path / "mine.npz")
    mistake = find_mistake(cells, has_data=False)
    assert mistake is not None
    assert mistake[1].startswith("data.classes: 2, but train ")


def test_errors_in_the_code_of_the_user_are_left_to_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other variants of the study still run."""
    matrix = expand(studies.study(tmp_path, BODY), tmp_path / "runs")
    monkeypatch.setattr("lit_attn.models.factory.build", lambda *_: {}["no such key"])
    assert find_mistake([job.config for job in matrix.jobs]) is None


def test_a_runner_that_is_killed_during_the_check_leaves_no_file(tmp_path: Path) -> None:
    studies.write(tmp_path, BODY)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-um", "lit_attn.ablate", "ablations.yaml"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline().startswith("checking the models and data of ")
        time.sleep(0.3)
        runner.kill()
    assert list(tmp_path.glob("tmp/lit_attn-*")) == []
