"""Hook of the documentation site: pages from outside docs/, formulas as MathML, and diagrams.

The pages in docs/ link to the log, the source and the evidence with paths that work in a clone.
The site gets a page for each such file: Markdown as it is, source code in a code block, and other
files as downloads. Formulas become MathML when the site is built, and diagrams the pictures that
write_diagrams.py has drawn, so no page needs a script from a network.
"""

import hashlib
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
OVERVIEW = "project/overview.md"
"""Page of README.md: MkDocs would take a page of the name README.md for the index of its folder."""
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
SHORT_CELL = re.compile(r"<td(?=[^>]*>(?:<a [^>]*>)?[^<>]{1,16}(?:</a>)?</td>)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HELP = re.compile(r"<!-- help of ([\w ]+) -->")
CODE = {".py": "python", ".yaml": "yaml", ".toml": "toml"}

_repository_paths: dict[str, str] = {}
"""Path in the repository of each page of the site that comes from outside docs/."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page or a download for each file outside docs/ that a page links to."""
    queue = [ROOT / name for name in ("README.md", "LOG.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    queue += [target for page in files.documentation_pages() for target in _linked_files(page)]
    while queue:
        path = queue.pop()
        address = _address(path)
        if address in files.src_uris or path.is_relative_to(ROOT / "docs"):
            continue
        _repository_paths[address] = path.relative_to(ROOT).as_posix()
        if path.suffix in CODE:
            title = f"# {_repository_paths[address]}"
            content = f"{title}\n\n~~~~{CODE[path.suffix]}\n{path.read_text()}\n~~~~\n"
            files.append(File.generated(config, address, content=content))
        else:
            files.append(File.generated(config, address, abs_src_path=str(path)))
            if path.suffix == ".md":
                queue += _targets(path.read_text(), path.parent)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their pages; insert help texts and diagrams."""
    source = page.file.src_uri
    folder = (ROOT / _repository_paths.get(source, f"docs/{source}")).parent

    def rewrite(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if not path.is_file():
            return match[0]
        return match[1] + posixpath.relpath(_address(path), posixpath.dirname(source)) + match[3]

    markdown = DIAGRAM.sub(
        lambda match: f"![](assets/diagrams/{picture_of(match[1]).name})", markdown
    )
    return HELP.sub(_print_help, LINK.sub(rewrite, markdown))


def picture_of(text: str) -> Path:
    """Return the path of the picture of a Mermaid block, which depends on its content alone."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return ROOT / "docs" / "assets" / "diagrams" / f"{digest}.svg"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the formulas of a page with MathML, and mark short cells, which stay on one line."""

    def to_mathml(match: re.Match[str]) -> str:
        formula = match[2].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
        if match[1] == "span":
            return convert(formula, display="inline")
        # Each equation is a formula of its own: on a telephone they stand below each other.
        equations = [convert(text, display="block") for text in formula.split(r"\qquad")]
        return f'<div class="formula">{"".join(equations)}</div>'

    return SHORT_CELL.sub('<td class="short"', FORMULA.sub(to_mathml, html))


def _address(path: Path) -> str:
    """Return the path of a file's page in the site."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return OVERVIEW
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"project/{name}.md" if path.suffix in CODE else f"project/{name}"


def _print_help(match: re.Match[str]) -> str:
    """Return a section with the help text of a command."""
    command = [sys.executable, "-m", "lit_attn", *match[1].split(), "--help"]
    finished = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "88"}, capture_output=True, check=True
    )
    return f"### lit-attn {match[1]}\n\n~~~~text\n{finished.stdout.decode()}~~~~"


def _linked_files(page: File) -> list[Path]:
    return _targets(page.content_string, (ROOT / "docs" / page.src_uri).parent)


def _targets(markdown: str, folder: Path) -> list[Path]:
    """Return the files of the repository that a page in `folder` links to."""
    paths = [(folder / match[2]).resolve() for match in LINK.finditer(markdown)]
    return [path for path in paths if path.is_file() and path.is_relative_to(ROOT)]
