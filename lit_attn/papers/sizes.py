"""Options of small models of the papers, which replace the published ones."""

from argparse import ArgumentParser

SIZES = {
    "--small": ("embedded", "data without a download, such as digits and Python's own text"),
    "--small-data": ("real", "CIFAR-100, the Penn Treebank and Multi30k from files in data/"),
}
"""Options of small models: the kind of their data, and its description in a help text."""


def add_size_options(parser: ArgumentParser, help: str) -> None:
    """Add the options of SIZES, of which one can be chosen; `small` is its kind of data, or empty.

    `help` is the help of each, with {data} for the description of its data.
    """
    sizes = parser.add_mutually_exclusive_group()
    for option, (kind, data) in SIZES.items():
        text = help.format(data=data)
        sizes.add_argument(
            option, dest="small", action="store_const", const=kind, default="", help=text
        )


def find_size_option(kind: str) -> str:
    """Return the option of SIZES with a kind of data."""
    options = {data_kind: option for option, (data_kind, _) in SIZES.items()}
    return options[kind]
