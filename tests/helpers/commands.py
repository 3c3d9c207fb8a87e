"""Commands of the package in new processes that need not import PyTorch and Lightning again.

The imports take up to ten seconds of a slow core. So each process of pytest starts one server that
imports them, and every command is a fork of this server. A command sees nothing of the test or of
another command: it starts with the modules of the package as they are after their import.
"""

import atexit
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from helpers.paths import ROOT


def run_python(folder: Path, *words: str) -> CompletedProcess[str]:
    """Run `python -m MODULE ...` or `python SCRIPT ...` in the folder, in an own process."""
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as outputs:
        request = {"words": words, "folder": str(folder), "outputs": outputs}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = ((Path(outputs) / name).read_text(encoding="utf-8") for name in ("out", "err"))
    return CompletedProcess(words, code, out, err)


@functools.cache
def start_server() -> subprocess.Popen[str]:
    """Start the server of this process, which ends when its input is closed."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "helpers.commands"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Answer each request with the exit code of a fork that runs it."""
    import lit_attn.training.fit  # noqa: F401

    sys.path.remove(str(ROOT / "tests"))
    os.environ["PYTHONPATH"] = str(ROOT)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(words: list[str], folder: str, outputs: str) -> None:
    """Run a command in this process as a new interpreter would."""
    streams = (Path(os.devnull), "r"), (Path(outputs, "out"), "w"), (Path(outputs, "err"), "w")
    for number, (path, mode) in enumerate(streams):
        with path.open(mode) as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    serve()
