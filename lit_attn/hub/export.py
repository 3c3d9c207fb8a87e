"""Write a finished cell in the layout of the Hugging Face hub: weights, configuration and card.

A folder has the weights (model.safetensors), the configuration of the cell without the paths of
this machine (config.json), and a model card (README.md). `lit_attn.load_exported` returns its
network.
"""

from pathlib import Path

from lit_attn.schema.errors import OneLineParser, command, program
from lit_attn.schema.trust import TRUST_HELP


@command
def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 for an exported cell, and 2 for one that cannot be exported."""
    parser = OneLineParser(program("export"), page="running.md", description=__doc__)
    parser.add_argument("target", choices=["hub"], help="layout of the Hugging Face hub")
    parser.add_argument("cell", type=Path, metavar="CELL", help="folder of a finished cell")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder to write (default: hub in the folder of the cell)",
    )
    parser.add_argument("--trust-code", action="store_true", help=TRUST_HELP)
    options = parser.parse_args(arguments)
    # Imported here, because --help imports no PyTorch.
    from lit_attn.hub.folder import export

    out = options.out or options.cell / "hub"
    print(export(options.cell, out, trust_code=options.trust_code))
    return 0
