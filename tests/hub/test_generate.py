"""`python -m lit_attn.generate` with tiny trained models; every mistake is one line."""

import html
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finished_cells import train_cell
from helpers.training_cells import digits_cell, folder_of, text_cell

from lit_attn.attention.spec import PRESETS
from lit_attn.cells.records import Plan, PlannedCell, PlannedVariant
from lit_attn.cells.samples import Samples
from lit_attn.config.cell import Cell
from lit_attn.data.text.tokenizers import END_OF_LINE, UNKNOWN, ByteEncoder, WordEncoder
from lit_attn.hub.generate import decode_pieces, load_gpt, main
from lit_attn.report import write_reports
from lit_attn.schema.errors import ConfigError, escape_control
from lit_attn.schema.yaml_text import format_yaml, parse_plain

WORDS = "the cat sat on the mat\nthe dog ate the <unk>\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a model of bytes with learned positions and a context of 16."""
    return train_cell(text_cell(), tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def rotary_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cell = text_cell(model={"positions": "rotary", "attention": PRESETS["dcmha"]})
    return train_cell(cell, tmp_path_factory.mktemp("rotary"))


def train_on_text(root: Path, text: str, tokenizer: dict[str, Any]) -> Path:
    """Train a model on a text with this tokenizer, and return its run."""
    (root / "train.txt").write_text(text)
    data = {"train": str(root / "train.txt"), "test": None, "tokenizer": tokenizer}
    fields = text_cell(data=data).model_dump(mode="json")
    fields["metric"]["name"] = "val/loss"
    return train_cell(Cell.model_validate(fields), root)


@pytest.fixture(scope="module")
def words_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("words")
    return train_on_text(root, WORDS * 40, {"kind": "words", "size": 9})


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.process
def test_greedy_decoding_equals_the_argmax_over_the_whole_context(
    rotary_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is longer than the trained context of 16."""
    prompt = "The shape"
    text = output_of(capsys, rotary_run, "--prompt", prompt, "--temperature", "0", "--tokens", "30")
    network = load_gpt(rotary_run, Cell.read(rotary_run / "config.yaml"))
    device = network.trunk.tokens.weight.device
    ids = list(prompt.encode())
    for _ in range(30):
        with torch.no_grad():
            ids.append(int(network(torch.tensor([ids], device=device))[0, -1].argmax()))
        if ids[-1] == 0:
            break
    assert text == ByteEncoder().decode(i for i in ids if i) + "\n"
    assert len(ids) > len(prompt) + 5


@pytest.mark.process
def test_equal_seeds_give_equal_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [run, "--prompt", "def", "--tokens", "13"]
    first, again, other = (
        output_of(capsys, *arguments, "--seed", seed) for seed in ("5", "5", "6")
    )
    assert first == again != other
    assert first.startswith("def")
    assert output_of(capsys, *arguments, "--top-k", "1") == output_of(
        capsys, *arguments, "--temperature", "0"
    )


def test_tokens_are_limited_by_the_learned_positions(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 16 positions, a prompt of 10 leaves 6, and the last token needs no position."""
    message = error_of(capsys, run, "--prompt", "0123456789", "--tokens", "8")
    assert message == (
        "--tokens: 8 after a prompt of 10 exceed the 16 positions that the model has learned. "
        "Choose at most 7.\n"
    )
    output_of(capsys, run, "--prompt", "0123456789", "--tokens", "7")
    output_of(capsys, run, "--prompt", "0123456789")
    output_of(capsys, run, "--prompt", "x" * 16)
    message = error_of(capsys, run, "--prompt", "x" * 17)
    assert message == "--prompt: has 17 tokens. The model has learned 16 positions.\n"


@pytest.mark.process
def test_word_models_generate_known_words(
    words_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output_of(capsys, words_run, "--prompt", "the  cat", "--tokens", "8")
    assert text.startswith("the cat ")
    vocabulary = {*WORDS.split(), END_OF_LINE}
    assert set(text.split()) <= vocabulary
    message = error_of(capsys, words_run, "--prompt", "the zebra")
    assert message == "--prompt: 'zebra' is not one of the 9 words; write <unk> for it\n"


@pytest.mark.process
def test_models_of_characters_generate_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_on_text(tmp_path, "né\n" * 100, {"kind": "characters", "size": 3})
    capsys.readouterr()
    text = output_of(capsys, run, "--prompt", "né", "--tokens", "8")
    assert len(text) == 2 + 8 + 1
    assert set(text) <= set("né\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: is empty"),
        (["--prompt", "\udcff"], "--prompt: is not UTF-8"),
        (["--prompt", "a", "--tokens", "0"], "--tokens: '0' is not a number from 1"),
        (["--prompt", "a", "--top-k", "0"], "--top-k: '0' is not a number from 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: -1.0 is not a number from 0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature: nan is not a number from 0"),
        (["--prompt", "a", "--seed", str(2**32)], f"--seed: {2**32} is not a number from 0 to"),
    ],
)
def test_impossible_options_are_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, run, *arguments)


def test_a_blank_prompt_has_no_word(words_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompt: is empty" in error_of(capsys, words_run, "--prompt", "   ")


def test_unusable_runs_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = error_of(capsys, tmp_path / "nowhere", "--prompt", "a")
    assert nowhere == f"{tmp_path}/nowhere/config.yaml: cannot be read: No such file or directory\n"
    images = folder_of(digits_cell(), tmp_path)
    message = error_of(capsys, tmp_path, "--prompt", "a")
    assert message == f"{tmp_path}: is not the folder of a cell; did you mean '{images}'?\n"
    assert "its task is image-classification" in error_of(capsys, images, "--prompt", "a")
    unfinished = folder_of(text_cell(), tmp_path / "unfinished")
    message = error_of(capsys, unfinished, "--prompt", "a")
    assert message == (
        f"{unfinished}/checkpoints/weights.pt: is missing. A cell writes its weights there when it "
        "finishes.\n"
    )


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "list", "code"])
def test_unusable_weights_are_one_line(
    run: Path, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "weights.pt"
    contents: dict[str, Any] = {"other": {"a": torch.zeros(2)}, "list": [1], "code": Path("x")}
    if damage in contents:
        torch.save(contents[damage], path)
    else:
        path.write_bytes(path.read_bytes()[: 1000 if damage == "cut" else 0])
    message = error_of(capsys, tmp_path / "run", "--prompt", "a")
    assert message.startswith(f"{path}: are not the weights of this cell (")


def test_a_character_is_printed_when_all_of_its_bytes_exist() -> None:
    """Bytes that are no text are replaced at the end, or before the next character."""
    encoded = "añ\N{EURO SIGN}b".encode()
    assert [p for p in decode_pieces(ByteEncoder(), list(b"a"), encoded[1:]) if p] == [
        "a",
        "ñ",
        "\N{EURO SIGN}",
        "b",
    ]
    broken = "".join(decode_pieces(ByteEncoder(), list(b"a"), [0xC3, 0x62, 0xE2]))
    assert broken == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


def test_the_text_ends_at_the_end_of_the_document() -> None:
    assert "".join(decode_pieces(ByteEncoder(), list(b"a"), [98, 0, 99])) == "ab"


def test_a_word_prompt_has_line_ends_only_where_written() -> None:
    encoder = WordEncoder(["a", "b", END_OF_LINE, UNKNOWN])
    assert encoder.prompt("a b") == [0, 1]
    assert encoder.prompt("a b\n") == [0, 1, 2]
    assert encoder.prompt("a\nb") == [0, 2, 1]
    assert encoder.prompt("a <unk>") == [0, 3]
    assert encoder.prompt("") == []
    with pytest.raises(ConfigError, match=r"'c' is not one of the 1 words$"):
        WordEncoder(["a"]).prompt("a c")


@pytest.mark.process
def test_a_closed_pipe_ends_the_program_quietly(run: Path) -> None:
    command = [sys.executable, "-m", "lit_attn.generate", str(run), "--prompt", "a"]
    reader, writer = os.pipe()
    os.close(reader)
    finished = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (finished.returncode, finished.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_terminal_executes_no_generated_escape_sequence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_attn.hub.generate.generate", lambda options: iter(["a\n\x1b[2J"]))
    for is_terminal, text in ((False, "a\n\x1b[2J\n"), (True, "a\n\\x1b[2J\n")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda answer=is_terminal: answer)
        assert main(["run", "--prompt", "a"]) == 0
        assert capsys.readouterr().out == text


def test_help_imports_no_torch() -> None:
    code = (
        "import sys, lit_attn.hub.generate as g\n"
        "try: g.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--top-k" in done.stdout


@pytest.mark.process
def test_each_variant_of_a_study_writes_a_text_that_its_page_shows(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One variant has two finished cells, and one has none."""
    study = tmp_path / "runs" / "t"
    text_of_v = output_of(capsys, run, "--prompt", "<b", "--tokens", "9").removesuffix("\n")
    identity = Cell.read(run / "config.yaml").fingerprint
    cells = []
    for variant, seed in (("v", 0), ("v", 1), ("later", 0)):
        path = f"{variant}/{seed}"
        cells.append(PlannedCell(variant=variant, seed=seed, identity=identity, path=path))
        if variant == "v":
            shutil.copytree(run, study / path)
    variants = [PlannedVariant(name="v", label="V & co"), PlannedVariant(name="later")]
    metric = Cell.read(run / "config.yaml").metric
    plan = {"study": "t", "title": "T", "baseline": "v", "metric": metric, "seeds": [0, 1]}
    Plan.model_validate(plan | {"variants": variants, "cells": cells}).write(study / "plan.json")
    printed = output_of(capsys, study, "--prompt", "<b", "--tokens", "9")
    assert printed == f"== V & co, seed 0\n{text_of_v}\n"
    (report,) = write_reports(tmp_path / "runs", tmp_path / "reports")
    page = (report / "table.html").read_text()
    assert "V &amp; co, seed 0</h3>" in page
    assert f"<pre>{html.escape(escape_control(text_of_v), quote=False)}</pre>" in page
    assert "temperature 1 and random seed 0" in page
    # A cell that was trained again has not written this text.
    fields = Samples.model_validate_json((study / "samples.json").read_text()).model_dump()
    fields["samples"][0]["identity"] = "0" * 10
    Samples.model_validate(fields).write(study / "samples.json")
    write_reports(tmp_path / "runs", tmp_path / "reports")
    assert "Generated text" not in (report / "table.html").read_text()
    shutil.rmtree(study / "v")
    message = error_of(capsys, study, "--prompt", "a")
    assert message == f"{study}: no cell of this study has a result yet\n"


def test_an_own_optimizer_needs_no_trust_and_no_import(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that only the training needs is read with --trust-code alone."""
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    fields = parse_plain(config.read_text(), "text")
    fields["parts"] = [str(tmp_path / "missing_part.py")]
    fields["experiment"]["optimizer"] = {"kind": "module", "import": "missing_part:Lion", "lr": 0.1}
    config.write_text(format_yaml(fields))
    arguments = [tmp_path / "run", "--prompt", "a", "--tokens", "1"]
    assert output_of(capsys, *arguments)
    assert error_of(capsys, *arguments, "--trust-code").endswith("missing_part.py: no such file\n")
