"""Run the studies of an ablations.yaml: `python -m lit_attn.ablate ablations.yaml`."""

import argparse
import sys
from collections.abc import Sequence

from lit_attn.ablate.commands.rerun import Rerun
from lit_attn.ablate.commands.run import TARGET, Run
from lit_attn.ablate.commands.seal import Seal
from lit_attn.ablate.commands.status import Logs, Status
from lit_attn.judging.judge_command import Judge
from lit_attn.schema.commands import Command, route
from lit_attn.schema.errors import command


@command
def main(arguments: Sequence[str] | None = None, target: str = TARGET) -> int:
    """Run a command and return its exit code (see epilog.txt).

    Words that begin with no other command are those of `run`. Cells run the function `target`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    others: dict[str, Command] = {
        "rerun": Rerun(target),
        "status": Status(),
        "judge": Judge(),
        "seal": Seal(),
        "logs": Logs(),
    }
    if not words or words[0] not in others:
        words = ["run", *words]
    return route(argparse.ArgumentParser(), {"run": Run(target), **others}, words)


if __name__ == "__main__":
    sys.exit(main())
