"""Generator of the site's diagrams, run in the root of the repository:

    python docs/generators/write_diagrams.py mermaid.min.js

GitHub draws the Mermaid blocks of a page itself. The documentation site shows pictures, so that it
works without a network. This command draws every block in docs/ with Chromium and a file of Mermaid
(version 11), and writes docs/assets/diagrams/HASH.svg, where HASH is that of the block. A test
fails if a block has no picture.
"""

import re
import shutil
import sys
from pathlib import Path

from site_pages import DIAGRAM, ROOT, picture_of

OPTIONS = (
    "{startOnLoad: false, theme: 'neutral', flowchart: {htmlLabels: false}, "
    "fontFamily: 'sans-serif'}"
)
# The serializer closes all tags, which XML needs and HTML does not.
DRAW = """async ([name, text]) => {
    const drawn = document.createElement('div');
    drawn.innerHTML = (await mermaid.render(name, text)).svg;
    return new XMLSerializer().serializeToString(drawn.firstChild);
}"""


def main(script: Path) -> None:
    """Replace the pictures in docs/assets/diagrams by those of the present blocks."""
    from playwright.sync_api import sync_playwright

    pages = sorted((ROOT / "docs").glob("*.md"))
    blocks = [text for page in pages for text in DIAGRAM.findall(page.read_text())]
    shutil.rmtree(picture_of("").parent, ignore_errors=True)
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=script)
        page.evaluate(f"mermaid.initialize({OPTIONS})")
        for text in blocks:
            drawn: str = page.evaluate(DRAW, ["diagram", text])
            # Pixels with one decimal are enough, and the file becomes three times smaller.
            rounded = re.sub(r"-?\d+\.\d{2,}", lambda match: f"{float(match[0]):.1f}", drawn)
            picture_of(text).parent.mkdir(parents=True, exist_ok=True)
            picture_of(text).write_text(rounded + "\n")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
