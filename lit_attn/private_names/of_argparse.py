"""Use of argparse's private names; NAMES in lit_attn.private_names explains each."""

import argparse


def list_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments and options of a parser."""
    return parser._actions
