"""`lit-attn export hub`: an exported folder loads again to the same outputs."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import run_python
from helpers.training_cells import digits_cell, folder_of, text_cell
from huggingface_hub import ModelCard

from lit_attn.__main__ import main
from lit_attn.attention.spec import PRESETS
from lit_attn.cells.records import Result
from lit_attn.config.cell import Cell
from lit_attn.hub import load_exported
from lit_attn.schema.errors import ConfigError
from lit_attn.schema.yaml_text import format_yaml, parse_plain
from lit_attn.train import run_cell
from lit_attn.training.build import build

CPU = torch.device("cpu")
METRIC = {"name": "test/averaged-accuracy", "label": "accuracy (%)", "goal": "max", "scale": 100}
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def averaged_cell() -> Cell:
    """Return a cell with averaged weights and a matched FFN."""
    belief2 = {"attention": PRESETS["belief2"]}
    plain = digits_cell(model={"ffn": {"width": 64}})
    cell = digits_cell(
        training={"average": {"decay": 0.5}, "epochs": 1}, model=belief2, metric=METRIC
    )
    return cell.model_copy(update={"match_to": plain.experiment.model})


def tied_cell() -> Cell:
    """Return a cell whose network has one matrix under two names, and whose data have a path."""
    arguments = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    fields = text_cell(training={"epochs": 2}).model_dump(mode="json")
    model = {"kind": "transformers", "architecture": "gpt2", "arguments": arguments}
    fields["experiment"]["model"] = model
    return Cell.model_validate(fields)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("runs")
    cells = {"averaged": averaged_cell(), "tied": tied_cell()}
    folders = {name: folder_of(cell, root / name) for name, cell in cells.items()}
    for folder in folders.values():
        run_cell(folder)
    return folders


@pytest.fixture(scope="module")
def exported(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the exported folder of each run."""
    root = tmp_path_factory.mktemp("exported")
    for name, folder in runs.items():
        assert main(["export", "hub", str(folder), f"--out={root / name}"]) == 0
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", ["averaged", "tied"])
def test_an_exported_network_has_the_same_outputs_bit_by_bit(
    name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = runs[name]
    assert main(["export", "hub", str(folder), "--out", str(tmp_path / "out")]) == 0
    cell = Cell.read(folder / "config.yaml")
    parts = build(cell, CPU)
    trained = parts.task.network.eval()
    weights = "averaged.pt" if name == "averaged" else "weights.pt"
    trained.load_state_dict(torch.load(folder / "checkpoints" / weights, weights_only=True))
    batch = next(iter(parts.data.val_dataloader()[0]))
    inputs = parts.task.inputs(batch)
    moved = Path(shutil.move(tmp_path / "out", tmp_path / "moved"))
    network = load_exported(moved)
    assert not network.training
    with torch.no_grad():
        assert torch.equal(network(*inputs), trained(*inputs))


def test_the_card_and_the_configuration_describe_the_cell(
    runs: dict[str, Path], exported: Path
) -> None:
    card = ModelCard.load(exported / "averaged" / "README.md")
    result = Result.model_validate_json((runs["averaged"] / "result.json").read_text())
    (measured,) = card.data.eval_results
    assert (measured.metric_type, measured.dataset_name) == ("test/averaged-accuracy", "digits")
    assert measured.metric_value == result.metrics["test/averaged-accuracy"]
    assert card.data.library_name == "lit_attn"
    for text in (f"{100 * measured.metric_value:.4g}", result.code, result.data, "seed 0", "zz"):
        assert text in card.text
    assert "load_exported" in card.text
    fields = json.loads((exported / "averaged" / "config.json").read_text())
    assert Cell.model_validate(fields).fingerprint == result.identity


@pytest.mark.parametrize(
    ("name", "text"),
    [("averaged", 'belief2, {"residual": {"kind": "split"}, "zz": true}'), ("tied", "standard")],
)
def test_the_card_names_the_attention(name: str, text: str, exported: Path) -> None:
    assert f"\n| attention | {text} |\n" in (exported / name / "README.md").read_text()


def test_trackers_are_not_exported(runs: dict[str, Path], tmp_path: Path) -> None:
    """The address of a tracker may be private, and `file:mlruns` would look like a class."""
    folder = shutil.copytree(runs["averaged"], tmp_path / "run")
    fields = parse_plain((folder / "config.yaml").read_text(), "text")
    fields["experiment"]["training"]["loggers"] = [{"kind": "mlflow", "uri": "file:mlruns"}]
    (folder / "config.yaml").write_text(format_yaml(fields))
    assert main(["export", "hub", str(folder), f"--out={tmp_path / 'out'}"]) == 0
    assert "mlruns" not in (tmp_path / "out" / "config.json").read_text()
    load_exported(tmp_path / "out")


def test_no_absolute_path_is_exported(runs: dict[str, Path], exported: Path) -> None:
    out = exported / "tied"
    written = (out / "config.json").read_text() + (out / "README.md").read_text()
    assert '"train.txt"' in written
    config = parse_plain((runs["tied"] / "config.yaml").read_text(), "config.yaml")
    assert str(Path(config["experiment"]["data"]["train"]).parent) not in written


def test_what_cannot_be_exported_is_one_line(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = folder_of(digits_cell(), tmp_path / "unfinished")
    torn = tmp_path / "torn"
    shutil.copytree(runs["averaged"], torn, ignore=shutil.ignore_patterns("hub"))
    (torn / "checkpoints" / "averaged.pt").write_bytes(b"x")
    cases: list[tuple[list[str], str]] = [
        ([str(unfinished)], "has no result; finish it with `lit-attn train"),
        ([str(torn)], "averaged.pt: are not the weights of this cell"),
        ([str(runs["tied"]), f"--out={tmp_path}"], "is not empty"),
        ([str(tmp_path / "none")], "config.yaml: cannot be read"),
    ]
    for words, message in cases:
        assert main(["export", "hub", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


def change(folder: Path, out: Path, **model: Any) -> Path:
    """Copy an exported folder with other keys of the model."""
    shutil.copytree(folder, out)
    fields = json.loads((out / "config.json").read_text())
    fields["experiment"]["model"] = {**fields["experiment"]["model"], **model}
    (out / "config.json").write_text(json.dumps(fields))
    return out


def test_torn_folders_are_refused(exported: Path, tmp_path: Path) -> None:
    out = change(exported / "averaged", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"model\.safetensors: are not the weights of this cell"):
        load_exported(change(out, tmp_path / "shallow", depth=1))
    with pytest.raises(ConfigError, match=r"config\.json: experiment\.model\.dim: "):
        load_exported(change(out, tmp_path / "wrong", dim="x"))
    (out / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        load_exported(out)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        load_exported(tmp_path / "none")


def test_a_network_with_code_is_exported_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of the card loads the network in another process, without the original files."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = tmp_path / "source"
    source.mkdir()
    (source / "exported_scale.py").write_text("SCALE = 3.0\n")
    (source / "exported_mixer.py").write_text(MIXER)
    values = digits_cell(training={"max_steps": 1}).model_dump(mode="json")
    values["parts"] = [str(source / "exported_mixer.py")]
    mixer = {"kind": "module", "import": "exported_mixer:Scaled"}
    values["experiment"]["model"]["attention"] = mixer
    folder = folder_of(Cell.parse(values, "cell"), tmp_path)
    run_cell(folder)
    out = tmp_path / "out"
    assert main(["export", "hub", str(folder), f"--out={out}", "--trust-code"]) == 0
    shutil.rmtree(source)
    with pytest.raises(ConfigError, match=r"this run executes the code in import: exported_mixer"):
        load_exported(out)
    _, code, _ = (out / "README.md").read_text().split("```")
    code = code.removeprefix("python").replace("FOLDER", "out")
    code += "\nprint(float(network.head.weight.sum()), network.blocks[0].attn)"
    done = run_python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    weights = torch.load(folder / "checkpoints" / "weights.pt", weights_only=True)
    assert str(float(weights["head.weight"].sum())) in done.stdout
    assert "Scaled" in done.stdout


MIXER = """\
import torch
from exported_scale import SCALE

class Scaled(torch.nn.Linear):
    def __init__(self, dim, heads):
        super().__init__(dim, dim)

    def forward(self, x):
        return SCALE * super().forward(x)
"""
