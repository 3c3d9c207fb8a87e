"""Evaluate a language model with lm-evaluation-harness.

    python experiments/released/evaluation_harness.py

The tasks of DCMHA's Table 4 are lambada_openai, piqa, winogrande, arc_easy, arc_challenge, sciq,
logiqa, boolq, hellaswag, race (RACE-H) and race_middle (RACE-M, in the folder harness_tasks beside
this file), with --shots 0 and 5. They download their data, unless they come from --include, a
folder with task files of your own. It needs `pip install 'lit_attn[harness]'`.

Two files are written to --out: harness-K.json with all results of this run, and harness-K.csv
(task, metric, value), where K is the number of shots. The metric acc_stderr is the standard error
of acc, with which the page of the paper judges claims. The CSV file keeps the results of other
tasks, so tasks can run one by one, and `text_perplexity.py` adds perplexities. The page that
`python -m lit_attn.report --paper dcmha` writes shows the files of models in runs/released-weights.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from language_models import (
    WINDOW,
    LanguageModel,
    add_model,
    add_results,
    load_model,
    merge_results,
)

from lit_attn.extras import require
from lit_attn.files import write_json
from lit_attn.schema.errors import ConfigError, OneLineParser, command

TASKS = Path(__file__).parent / "harness_tasks"
BOOTSTRAP_SAMPLES = 100
"""Samples for the standard errors of perplexities; those of accuracies follow from a formula."""


@command
def main(arguments: list[str] | None = None) -> int:
    """Evaluate a model and print the results; return exit code 0, or 2 for wrong input."""
    parser = OneLineParser(
        prog="python experiments/released/evaluation_harness.py", description=__doc__
    )
    add_model(parser)
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names of tasks")
    parser.add_argument("--shots", type=int, default=0, metavar="K", help="examples (default 0)")
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="folder of task files")
    add_results(parser)
    evaluate(parser.parse_args(arguments))
    return 0


def evaluate(options: Namespace) -> None:
    """Write and print the results of the harness."""
    evaluator = require("lm_eval.evaluator", "--tasks", "harness")
    tasks = require("lm_eval.tasks", "--tasks", "harness")
    folders = [TASKS]
    if options.include is not None:
        folders.append(options.include)
    manager = tasks.TaskManager(include_path=folders)
    known = set(manager.all_tasks)
    unknown = [name for name in options.tasks if name not in known]
    if unknown:
        raise ConfigError(f"--tasks: the harness has no task '{unknown[0]}'")
    adapter = build_adapter(load_model(options.model, options.tokenizer))
    evaluated = evaluator.simple_evaluate(
        adapter,
        tasks=options.tasks,
        num_fewshot=options.shots,
        limit=options.limit,
        task_manager=manager,
        # Without it the harness leaves out all standard errors, also those with a formula.
        bootstrap_iters=BOOTSTRAP_SAMPLES,
        log_samples=False,
    )
    results = evaluated["results"]
    folder, name = options.out or options.model, f"harness-{options.shots}"
    write_json(folder / f"{name}.json", results)
    merge_results(folder / f"{name}.csv", list_values(results))
    print(json.dumps(results, indent=2, default=str))


def list_values(results: dict[str, dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Return (task, metric, value) of every number; filters do not name a metric."""
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            if isinstance(value, int | float):
                rows.append((task, name.removesuffix(",none"), value))
    return rows


def build_adapter(model: LanguageModel) -> Any:
    """Return the model as a `TemplateLM` of the harness; ConfigError if that is not installed."""
    require("lm_eval.api.model", "--tasks", "harness")
    from lm_eval.api.model import TemplateLM

    scorer = Scorer(model)

    class HarnessModel(TemplateLM):
        """Model whose requests a `Scorer` answers; the harness defines the methods."""

        @property
        def eot_token_id(self) -> int:
            return scorer.end

        def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
            return model.encoder.prompt(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [scorer.score(context, continuation) for _, context, continuation in requests]

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [scorer.score_document(request.args[0]) for request in requests]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [scorer.generate(*request.args) for request in requests]

    return HarnessModel()


class Scorer:
    """Log-likelihoods and greedy continuations of a language model, as the harness needs them."""

    def __init__(self, model: LanguageModel) -> None:
        """Raise ConfigError if the tokenizer has no end of a document, which starts a document."""
        if model.encoder.end is None:
            raise ConfigError(f"{model.name}: its tokenizer has no token between documents")
        self.model = model
        self.end = model.encoder.end
        self.window = model.max_tokens or WINDOW

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Return log p of a continuation, and True if greedy decoding writes it.

        The context loses its first tokens if both are longer than the window.
        """
        log_p, is_greedy = self.model.score(context, continuation, self.window)
        return float(sum(log_p.tolist())), is_greedy

    def score_document(self, text: str) -> float:
        """Return log p of a document, whose first token follows the end of another document.

        Windows and contexts are those of the harness for models of transformers: every token is
        scored once, and only the last window has more than one token of context.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        ids = self.model.encoder.prompt(text)
        windows = get_rolling_token_windows(ids, self.end, self.window, 1)
        return sum(self.score(*pair)[0] for pair in map(make_disjoint_window, windows))

    def generate(self, context: str, options: dict[str, Any]) -> str:
        """Return the greedy continuation of a context, up to the first text of `until`."""
        from lit_attn.models.language import Sampling, continuation

        stops = options.get("until") or []
        if isinstance(stops, str):
            stops = [stops]
        count = int(options.get("max_gen_toks", 256))
        network = self.model.network
        encoder = self.model.encoder
        prompt = encoder.prompt(context) or [self.end]
        # The window has room for the last tokens of the prompt and the continuation.
        prompt = prompt[-max(1, self.window - count) :]
        count = min(count, self.window - len(prompt) + 1)
        ids: list[int] = []
        text = ""
        sampling = Sampling(temperature=0)
        for number in continuation(network, prompt, count, self.model.vocabulary, sampling):
            if number == self.end:
                break
            ids.append(number)
            text = encoder.decode(ids)
            ends = [text.index(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
        return text


if __name__ == "__main__":
    sys.exit(main())
