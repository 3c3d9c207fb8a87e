"""Tests of the pages about data of the user: their study and experiments run as printed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.tar_files import write_tar
from PIL import Image
from sklearn.datasets import load_digits

from lit_attn.ablate.input_files import require_inputs
from lit_attn.ablate.plan import expand
from lit_attn.config.study import read_studies
from lit_attn.train import run_cell

TRAIN, TEST = slice(0, 200), slice(200, 300)


def write_npz(path: Path) -> None:
    digits = load_digits()
    images = (digits.images * 15).astype(np.uint8)
    np.savez(
        path,
        x_train=images[TRAIN],
        y_train=digits.target[TRAIN],
        x_test=images[TEST],
        y_test=digits.target[TEST],
    )


def write_folders(root: Path) -> None:
    digits = load_digits()
    for split, part in (("train", TRAIN), ("test", TEST)):
        for index, (image, label) in enumerate(
            zip(digits.images[part], digits.target[part], strict=True)
        ):
            path = root / split / str(label) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype(np.uint8)).save(path)


def blocks(page: str) -> list[str]:
    """Return the pieces of YAML on a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)


def replace_keys(experiment: str, block: str) -> str:
    """Return the experiment with the lines of the block in place of those of the same keys."""
    pieces = [re.split(r"^(?=\w)", text, flags=re.MULTILINE) for text in (experiment, block)]
    old, new = ({piece.partition(":")[0]: piece for piece in part[1:]} for part in pieces)
    return pieces[1][0] + "".join({**old, **new}.values())


OWN, STUDY, *OTHERS = blocks("own-data.md")
COMPLETED = [replace_keys(OWN, block) for block in OTHERS]
NAMED = [*COMPLETED, *blocks("text-data.md"), blocks("segmentation.md")[0]]
EXPERIMENTS = {re.match(r"# ([\w-]+)", block)[1]: block for block in NAMED}


def write_shards(root: Path) -> None:
    for split in ("train", "test"):
        members = []
        for path in sorted((root.parent / "images" / split).glob("*/*.png")):
            members.append((f"{path.stem}.png", path.read_bytes()))
            members.append((f"{path.stem}.cls", path.parent.name.encode()))
        write_tar(root / split / "0.tar", members)


def write_tables(root: Path) -> None:
    for split in ("train", "test"):
        rows = ["image,label,height,age"]
        for number, path in enumerate(sorted((root / "images" / split).glob("*/*.png"))):
            rows.append(f"{path.relative_to(root)},class {path.parent.name},{number / 9},{number}")
        (root / f"{split}.csv").write_text("\n".join(rows) + "\n")
    texts = [{"text": f"text number {i}", "label": "even" if i % 2 else "odd"} for i in range(40)]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    words = [(f"word {i} .".split(), ["O", "NUMBER", "STOP"]) for i in range(40)]
    tagged = [json.dumps({"tokens": tokens, "tags": tags}) for tokens, tags in words]
    (root / "tags.jsonl").write_text("\n".join(tagged) + "\n")
    colours = ["red", "green", "blue"]
    columns = [f"{i / 9},{i % 13},{colours[i % 3]},{'ab'[i % 2]}" for i in range(80)]
    lines = ["height,age,colour,grade", *columns]
    (root / "columns.csv").write_text("\n".join(lines) + "\n")
    for split, number in (("train", 8), ("test", 4)):
        for name in ("good", "bad"):
            folder = root / "reviews" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                (folder / f"{i}.txt").write_text(f"A {name} text, number {i}.\n")
    (root / "train.txt").write_text("A line of text.\n" * 50)
    (root / "sentences").mkdir()
    for name, count in (("train", 60), ("valid", 4), ("test", 4)):
        for language, word in (("de", "Satz"), ("en", "sentence")):
            lines = "".join(f"{word} {i % 7} .\n" for i in range(count))
            (root / "sentences" / f"{name}.{language}").write_text(lines)


def write_targets(path: Path) -> None:
    write_npz(path)
    arrays = dict(np.load(path))
    for split in ("train", "test"):
        labels = arrays[f"y_{split}"]
        arrays[f"y_{split}"] = np.stack([labels / 3, -labels], 1)
    np.savez(path, **arrays)


def write_masks(root: Path) -> None:
    digits = load_digits().images
    for split, count in (("training", 8), ("validation", 2)):
        for kind, ending in (("images", "jpg"), ("annotations", "png")):
            (root / kind / split).mkdir(parents=True)
            for number in range(count):
                pixels = np.kron(digits[number] * 15, np.ones((2, 2))).astype(np.uint8)
                if kind == "annotations":
                    pixels = np.array([0, 128, 255], np.uint8)[np.digitize(pixels, [60, 150])]
                image = Image.fromarray(pixels).convert("RGB")
                image.save(root / kind / split / f"{number}.{ending}")


def run(experiment: str, study: str, folder: Path) -> None:
    """Run the last cell of the study, and assert that it is done."""
    (folder / "own.yaml").write_text(experiment)
    (folder / "own-study.yaml").write_text(study)
    (source,) = read_studies(folder / "own-study.yaml").values()
    matrix = expand(source, folder / "runs")
    require_inputs([matrix], matrix.jobs)
    cell = matrix.jobs[-1]
    cell.folder.mkdir(parents=True)
    cell.write_config()
    run_cell(cell.folder)
    assert cell.state() == "done"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_kind_of_data_on_the_page_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "masks":
        pytest.importorskip("mmseg")
        write_masks(tmp_path / "scenes")
    if name.startswith("table"):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if name in ("image-folder", "webdataset", "table-images", "table-targets"):
        write_folders(tmp_path / "images")
    if name == "webdataset":
        write_shards(tmp_path / "shards")
    if name == "npz-targets":
        write_targets(tmp_path / "targets.npz")
    write_tables(tmp_path)
    page = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\|.*`{name}`.*\|$", page, re.MULTILINE)
    metric = re.search(r"metric: \{.*?\}", row)
    study = STUDY + (f"    {metric[0]}\n" if metric else "")
    run(EXPERIMENTS[name], study, tmp_path)


@pytest.mark.slow
def test_the_study_of_the_page_runs(tmp_path: Path) -> None:
    write_npz(tmp_path / "images.npz")
    run(OWN, STUDY, tmp_path)
