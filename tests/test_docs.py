"""Tests of the documentation: examples run, links and paths exist, commands have their options."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from helpers.commands import run_new_python, run_python
from helpers.paths import ROOT

from lit_attn.ablate.plan import expand
from lit_attn.cells.records import Plan
from lit_attn.config.study import choose, read_studies

CHECK = """
import sys
sys.path.insert(0, {tests!r})
from helpers import attention_cases, own_parts
import torch
from lit_attn.attention.layer import attn_layer
from lit_attn.attention.spec import AttentionSpec
from helpers.attention_checks import assert_same, make, tokens

specs = attention_cases.all_specs()
chosen = [s for s in specs if s.residual.kind == "reflected"]
assert {{s.residual.scope for s in chosen}} == {{"global", "head"}}
assert AttentionSpec.model_validate({{"residual": "reflected"}}).residual == ReflectedConfig()
for family, kind in [
    ("residual", "reflected"),
    ("residual", "gated"),
    ("similarity", "cosine"),
    ("compose", "neighbour"),
    ("normaliser", "off-by-one"),
]:
    chosen = [s for s in specs if getattr(s, family).kind == kind]
    crossed = {{tuple(part.kind for part in s.parts.values()) for s in chosen}}
    assert len(crossed) > 3
    for spec in chosen:
        assert_same(make(spec), tokens(7))
        layer, x = make(spec), tokens(7)
        assert_same(layer, x, is_causal=True)
        cache = layer.new_cache()
        pieces = [layer(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(7)]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x, is_causal=True))
        make(spec).float().to("meta")
assert all(p.is_meta for p in attn_layer(chosen[0])(24, 4, device="meta").parameters())

# A reflection keeps the length of what it reflects.
heads, values = torch.randn(2, 1, 5, 3, 8, dtype=torch.double).unbind()
turned = heads - 2 * residual.projected(heads, values, "head")
torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))
"""

MARKDOWN = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "reports/evidence/README.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path
    for pattern in ("lit_attn/**/*.py", "tests/**/*.py", "experiments/*.yaml", "ablations.yaml")
    for path in ROOT.glob(pattern)
)
FILE = re.compile(
    r"(?<![\w/.-])(?:docs|tests|lit_attn|experiments|reports/evidence)/[\w./-]*\.(?:py|md|yaml|csv|svg)"
)
# Packages of lit_attn: the pages name a module as `attention/spec.py`.
MODULE = re.compile(
    r"`((?:ablate|attention|bench|cells|config|data|models|optim|report|schema|tasks|training)"
    r"/[\w/]+\.py)`"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of the headings of a page (lower case, hyphens, no punctuation)."""
    headings = re.findall(r"^#+ (.*)$", without_code_blocks(page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.process
def test_the_example_of_adding_a_part_passes_the_conformance_checks() -> None:
    """The code runs in a new process, because a registered part cannot be removed."""
    text = (ROOT / "docs" / "adding-a-part.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    code += CHECK.format(tests=str(ROOT / "tests"))
    result = run_new_python(ROOT, "-c", code)
    assert result.returncode == 0, result.stderr


def test_the_example_of_the_readme_is_a_complete_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "mine.yaml"
    path.write_text(example.replace("experiments/", f"{ROOT}/experiments/"))
    (study,) = choose(read_studies(path), [], path)
    assert len(expand(study, tmp_path).jobs) == 4 * 5


@pytest.mark.parametrize("page", MARKDOWN, ids=relative)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code_blocks(page.read_text())):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


def test_the_questions_of_the_log_lead_to_every_entry() -> None:
    """A reader finds a result in the table at the top of LOG.md, without reading the entries."""
    log = ROOT / "LOG.md"
    entries = {anchor for anchor in anchors(log) if re.match(r"\d{4}-\d\d-\d\d-", anchor)}
    assert len(entries) > 30
    assert entries - set(re.findall(r"\]\(#([^)]*)\)", log.read_text())) == set()


@pytest.mark.parametrize("page", MARKDOWN, ids=relative)
def test_paths_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    paths = {*FILE.findall(text), *(f"lit_attn/{name}" for name in MODULE.findall(text))}
    # `lit-attn init` writes the files in the starter's folder.
    folders = ROOT, ROOT / "lit_attn" / "starter"
    missing = [path for path in paths if not any((folder / path).exists() for folder in folders)]
    assert missing == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/notebooks/*.ipynb")]
    names = {page.relative_to(ROOT / "docs").as_posix() for page in pages} - {"index.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


def test_the_first_page_has_the_question_the_picture_two_commands_and_the_table() -> None:
    """The numbers of the table are those of the README, which tests/test_readme.py compares."""
    index = (ROOT / "docs" / "index.md").read_text()
    lead, _, _ = index.partition("## All pages")
    question, picture, commands, table = (
        lead.index(text) for text in ("**Does ", "![", "```console", "| change |")
    )
    assert question < picture < commands < table
    (block,) = re.findall(r"```console\n(.*?)```", lead, re.DOTALL)
    assert len(block.splitlines()) == 2
    (rows,) = re.findall(r"^\| change .*?\n\n", lead, re.DOTALL | re.MULTILINE)
    assert rows in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["keys", "mechanisms", "papers"])
def test_a_written_page_does_not_begin_with_its_generator(name: str) -> None:
    """The command is a comment, which readers of the site do not see."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    comment, heading, first = page.split("\n\n", maxsplit=3)[:3]
    assert comment.startswith(f"<!-- python docs/generators/write_{name}.py")
    assert heading.startswith("# ")
    assert "docs/generators" not in first


def test_paths_and_sections_in_sources_exist() -> None:
    """Comments and docstrings name pages as `docs/setups.md` or `docs/setups.md, section 2`."""
    missing = []
    for source in SOURCES:
        text = re.sub(r"\s*\n\s*(?:# ?)?", " ", source.read_text(encoding="utf-8"))
        pages = [name for name in FILE.findall(text) if name.endswith(".md")]
        missing += [f"{relative(source)}: {name}" for name in pages if not (ROOT / name).exists()]
        for name, first, last in re.findall(
            r"(docs/[\w-]+\.md), sections? (\d+)(?: to (\d+))?", text
        ):
            page = (ROOT / name).read_text() if (ROOT / name).exists() else ""
            missing += [
                f"{relative(source)}: {name}, section {number}"
                for number in range(int(first), int(last or first) + 1)
                if f"\n## {number}. " not in page
            ]
    assert missing == []


def test_names_in_the_diagrams_exist() -> None:
    """A box of a diagram reads `["folder/module.py<br/>name, name"]`."""
    diagrams = re.findall(
        r"```mermaid\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.DOTALL
    )
    assert len(diagrams) == 2
    missing = []
    for diagram in diagrams:
        boxes = re.findall(r'\["([\w/]+\.py)(?:<br/>([^"]*))?"\]', diagram)
        assert len(boxes) >= 5
        for module, names in boxes:
            path = ROOT / "lit_attn" / module
            code = path.read_text() if path.exists() else ""
            defined = set(re.findall(r"^\s*(?:class|def) (\w+)", code, re.MULTILINE))
            missing += [
                f"{module}: {name}" for name in re.findall(r"\w+", names) if name not in defined
            ]
    assert missing == []


COMMAND = re.compile(
    r"python -m (lit_attn[\w.]*)"
    r"(?: (status|logs|attention|memory|decoding|pile|text|fineweb)\b)?([^`|\n]*)"
)


@cache
def help_text(module: str, subcommand: str) -> str:
    done = run_new_python(ROOT, "-m", module, *filter(None, [subcommand]), "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", MARKDOWN, ids=relative)
def test_documented_commands_have_their_options(page: Path) -> None:
    unknown = [
        f"{module} {subcommand} {option}"
        for module, subcommand, arguments in COMMAND.findall(page.read_text())
        for option in re.findall(r"(?<!\S)--[\w-]+", arguments)
        if option not in help_text(module, subcommand)
    ]
    assert unknown == []


@pytest.mark.process
def test_fast_commands_of_the_documentation_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "ablations.yaml", tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    for arguments in (
        "ablations.yaml --dry-run --params",
        "ablations.yaml --study belief2-cifar100 --dry-run",
        "ablations.yaml --study belief2-imagenet --set data.path=/data/pets --set data.name=pets "
        "--set data.classes=37 --dry-run",
        "seal ablations.yaml --study digits",
    ):
        result = run_python(tmp_path, "-m", "lit_attn.ablate", *arguments.split())
        assert result.returncode == 0, arguments + result.stdout + result.stderr


@pytest.mark.slow
def test_the_trial_of_the_readme_makes_results_and_tables(tmp_path: Path) -> None:
    (arguments,) = re.findall(
        r"`lit-attn (run --set [^`]*)` \| try",
        (ROOT / "README.md").read_text(),
    )
    shutil.copy(ROOT / "ablations.yaml", tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    result = run_python(tmp_path, "-m", "lit_attn", *arguments.split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list(tmp_path.glob("runs/*/*/*/result.json"))) == 4
    plans = {path.parent.name: path for path in tmp_path.glob("runs/*/plan.json")}
    assert plans
    for name, path in plans.items():
        assert "@training.max_steps=" in name
        assert Plan.model_validate_json(path.read_bytes()).study == name
        assert (tmp_path / "reports" / name / "table.html").exists()


def test_a_run_changes_no_committed_file() -> None:
    """Git ignores everything in reports/ except the evidence, and tracks nothing else there."""
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the sources is not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "reports", "runs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = listed.stdout.splitlines()
    assert tracked
    assert [name for name in tracked if not name.startswith("reports/evidence/")] == []
    ignored = subprocess.run(["git", "check-ignore", "-q", "reports/digits/table.md"], cwd=ROOT)
    assert ignored.returncode == 0
