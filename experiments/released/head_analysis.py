"""Analyse the heads of a language model.

    python experiments/released/head_analysis.py COMMAND MODEL

DCMHA (arXiv:2405.08553) shows head diversity in Figure 5, and for one example the terms of a
composition (Figure 7), attention distributions and dynamic weights (Figure 8).

`diversity` writes head_diversity.csv (layer, qk, ov): the captured variance of the QK and OV
circuits, as the diagnostics `heads` record it (docs/diagnostics.md).

`composition` reads a text (--text) and writes, for the last token as the query and for one layer:

    composition.csv  key, token, head, before, query-projection, query-gate, key-projection,
                     key-gate, matrix, after: the weights of each head before and after the
                     composition at --place, and the terms between them; they add up to `after`
    maps.csv         token, text, side, part, component, head, value: the dynamic weights of
                     every token that the query attends to, as key, and of the query

and draws, as .svg and .png, breakdown (Figure 7) for the token number --key (counted from 0; by
default the token whose weights change most), and distributions (Figure 8). `python -m
lit_attn.report --paper dcmha` shows the tables and pictures of the models in runs/released-weights.
"""

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from head_figures import draw_breakdown, draw_distributions
from language_models import LanguageModel, add_model, load_model

from lit_attn.cells.rows import csv_lines
from lit_attn.config.training import DiagnosticsConfig
from lit_attn.files import write_atomic
from lit_attn.report.figures import drawing
from lit_attn.schema.errors import ConfigError, OneLineParser, command

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from lit_attn.attention.compose import HeadMaps, Maps

TERMS = ("before", "query-projection", "query-gate", "key-projection", "key-gate", "matrix")


class Composition(NamedTuple):
    """One call of a composition: its input a (H, m) for one query, and the maps of both sides.

    `keys` are the numbers of the m tokens that are its keys. Maps have a batch axis of size 1.
    """

    composer: "HeadMaps"
    a: "Tensor"
    query: "Maps | None"
    key: "Maps | None"
    keys: range


@command
def main(arguments: list[str] | None = None) -> int:
    """Run a command; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(prog="python experiments/released/head_analysis.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in (("diversity", write_diversity), ("composition", write_composition)):
        subparser = commands.add_parser(name)
        subparser.set_defaults(function=function)
        add_model(subparser)
        text = "folder of the tables (default: heads in the folder of the model)"
        subparser.add_argument("--out", type=Path, metavar="FOLDER", help=text)
    subparser.add_argument("--text", required=True, help="text that ends with the query's token")
    subparser.add_argument("--layer", type=int, default=1, help="number of the layer (default 1)")
    text = "number of the token whose weights are broken down, from 0"
    subparser.add_argument("--key", type=int, metavar="N", help=text)
    text = "composition of logits (pre) or weights (post, the default)"
    subparser.add_argument("--place", choices=["pre", "post"], default="post", help=text)
    options = parser.parse_args(arguments)
    options.function(options)
    return 0


def write_diversity(options: Namespace) -> None:
    """Write and print the captured variance of every layer."""
    model = load_model(options.model, options.tokenizer)
    rows = measure_diversity(model)
    path = write_rows(options, "head_diversity.csv", [("layer", "qk", "ov"), *rows])
    print(path.read_text(), end="")


def measure_diversity(model: LanguageModel) -> list[tuple[int, float, float]]:
    """Return (layer, captured variance of QK, and of OV); lower values are more diverse heads."""
    from lit_attn.training.diagnostics import diagnose

    settings = DiagnosticsConfig(kinds=("heads",))
    rows = diagnose(model.network, (), settings, step=0).rows
    values = {(row.layer, row.name): row.value for row in rows}
    layers = sorted({layer for layer, _ in values})
    return [(n, values[n, "captured-qk"], values[n, "captured-ov"]) for n in layers]


def write_composition(options: Namespace) -> None:
    """Write the terms of a composition and the dynamic weights of its tokens."""
    import torch

    model = load_model(options.model, options.tokenizer)
    ids = model.encoder.prompt(options.text)
    if len(ids) < 1:
        raise ConfigError("--text: is empty")
    call = record_composition(model, ids, options.layer, options.place)
    terms = break_down(call)
    columns = [*terms.values(), torch.stack([*terms.values()]).sum(0)]
    names = [model.encoder.decode([number]) for number in ids]
    rows = []
    for place, key in enumerate(call.keys):
        for head in range(len(call.a)):
            values = [f"{column[head, place].item():.6g}" for column in columns]
            rows.append((key, names[key], head + 1, *values))
    header = ["key", "token", "head", *TERMS, "after"]
    print(write_rows(options, "composition.csv", [header, *rows]))
    header = ["token", "text", "side", "part", "component", "head", "value"]
    print(write_rows(options, "maps.csv", [header, *list_maps(call, names)]))
    for name, figure in draw_composition(call, terms, names, options.key).items():
        for kind, content in drawing.render(figure).items():
            write_atomic(get_folder(options) / f"{name}.{kind}", content)
        print(get_folder(options) / f"{name}.svg")


def draw_composition(
    call: Composition, terms: "dict[str, Tensor]", names: list[str], key: int | None
) -> "dict[str, Figure]":
    """Return the drawings of a composition by name, for the token number `key`.

    Raises ConfigError if the query does not attend to this token.
    """
    after = sum(terms.values(), start=0 * call.a)
    change = (after - terms["before"]).abs().sum(0)
    key = call.keys[int(change.argmax())] if key is None else key
    if key not in call.keys:
        raise ConfigError(
            f"--key: {key} is not one of the tokens {call.keys[0]} to {call.keys[-1]}"
        )
    place = call.keys.index(key)
    columns = {name: values[:, place].tolist() for name, values in terms.items() if values.any()}
    columns["after"] = after[:, place].tolist()
    parts = {}
    sides = (("key", call.key, len(call.keys)), ("query", call.query, 1))
    for side, maps_of_side, length in sides:
        for name, maps in zip(("down", "up"), maps_of_side or (), strict=False):
            if maps is None:
                continue
            for component in range(maps.shape[-2]):
                values = maps[0, -length:, component].tolist()
                parts[f"{side} {name} {component + 1}"] = values
    tokens = [names[number] for number in call.keys]
    weights = {"before": call.a.tolist(), "after": after.tolist()}
    with drawing.appearance():
        return {
            "breakdown": draw_breakdown(columns, parts, place),
            "distributions": draw_distributions(weights, parts, tokens),
        }


def record_composition(model: LanguageModel, ids: list[int], layer: int, place: str) -> Composition:
    """Return the composition of the last token at `place` in a layer, in float64.

    Raises ConfigError if the layer does not exist or does not compose its heads there.
    """
    import torch

    from lit_attn.attention.compose import HeadMaps
    from lit_attn.attention.layer import Attention
    from lit_attn.training.diagnostics import record_calls

    layers = [module for module in model.network.modules() if isinstance(module, Attention)]
    if not 1 <= layer <= len(layers):
        raise ConfigError(f"--layer: {layer} is not one of the layers 1 to {len(layers)}")
    attention = layers[layer - 1]
    if place not in attention.composers:
        raise ConfigError(f"--place: layer {layer} has no composition `{place}`")
    tokens = torch.tensor([ids], device=model.device)
    (call,) = record_calls(model.network, [attention], (tokens,))[0]
    composer = attention.composers[place]
    assert isinstance(composer, HeadMaps)
    recorded: list[tuple[Any, ...]] = []
    hook = composer.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs))
    precision = attention.qkv.weight.dtype
    try:
        with torch.no_grad():
            attention.double().record(**call.arguments | {"x": call.arguments["x"].double()})
    finally:
        hook.remove()
        attention.to(precision)
    a, query, key = recorded[-1]
    n = len(ids)
    return Composition(composer, a[0, :, -1], query, key, range(n - a.shape[-1], n))


def break_down(call: Composition) -> "dict[str, Tensor]":
    """Return the terms of a composition (H, m) by name; they add up to its output (DCMHA eq. 7)."""
    import torch

    a = call.a
    terms = dict.fromkeys(TERMS, torch.zeros_like(a))
    if call.composer.has_identity:
        terms["before"] = a
    if call.composer.matrix is not None:
        terms["matrix"] = call.composer.matrix.detach().to(a) @ a
    if call.query is not None:
        down, up, gate = (None if part is None else part[0, -1].to(a) for part in call.query)
        if down is not None and up is not None:
            terms["query-projection"] = up.T @ (down @ a)
        if gate is not None:
            terms["query-gate"] = gate.unsqueeze(-1) * a
    if call.key is not None:
        down, up, gate = (None if part is None else part[0].to(a) for part in call.key)
        if down is not None and up is not None:
            inner = torch.einsum("mrh,hm->mr", down, a)
            terms["key-projection"] = torch.einsum("mrg,mr->gm", up, inner)
        if gate is not None:
            terms["key-gate"] = gate.T * a
    return terms


def list_maps(call: Composition, names: list[str]) -> Iterable[tuple[Any, ...]]:
    """Yield the rows of maps.csv; components and heads are numbered from 1."""
    sides = {"query": (call.query, range(len(names) - 1, len(names))), "key": (call.key, call.keys)}
    for side, (maps, tokens) in sides.items():
        for part, weights in zip(("down", "up", "gate"), maps or (), strict=False):
            if weights is None:
                continue
            values = weights[0, -len(tokens) :].reshape(len(tokens), -1, len(call.a))
            for number, components in zip(tokens, values.tolist(), strict=True):
                for component, heads in enumerate(components, start=1):
                    for head, value in enumerate(heads, start=1):
                        place = (number, names[number], side, part, component, head)
                        yield (*place, f"{value:.6g}")


def write_rows(options: Namespace, name: str, rows: Iterable[Iterable[Any]]) -> Path:
    """Write a CSV file to the folder of the tables and return its path."""
    path = get_folder(options) / name
    write_atomic(path, csv_lines(rows))
    return path


def get_folder(options: Namespace) -> Path:
    """Return the folder of the tables and drawings."""
    folder: Path = options.out or options.model / "heads"
    return folder


if __name__ == "__main__":
    sys.exit(main())
