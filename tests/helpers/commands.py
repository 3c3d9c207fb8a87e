"""Commands of the package in new processes that need not import PyTorch and Lightning again.

The imports take up to ten seconds of a slow core. So each process of pytest starts one server that
imports them, and every command is a fork of this server. A command sees nothing of the test or of
another command: it starts with the modules of the package as they are after their import.

A command that trains cells starts a fork server of its own (lit_attn/ablate/launch.py), which would
import everything again. In these tests this fork server is a child of the command that was forked
before the command began.
"""

import atexit
import functools
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import util
from pathlib import Path
from subprocess import CompletedProcess

from helpers.paths import ROOT


def run_python(folder: Path, *words: str, **environment: str) -> CompletedProcess[str]:
    """Run `python -m MODULE ...` or `python SCRIPT ...` in the folder, in an own process."""
    server = start_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as outputs:
        request = {
            "words": words,
            "folder": str(folder),
            "outputs": outputs,
            "environment": environment,
        }
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


def become(words: list[str], folder: str, outputs: str, environment: dict[str, str]) -> None:
    """Run a command in this process as a new interpreter would."""
    os.environ.update(environment)
    streams = (Path(os.devnull), "r"), (Path(outputs, "out"), "w"), (Path(outputs, "err"), "w")
    for number, (path, mode) in enumerate(streams):
        with path.open(mode) as file:
            os.dup2(file.fileno(), number)
    os.chdir(folder)
    prepare_fork_server()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def prepare_fork_server() -> None:
    """Fork the process that `multiprocessing` will get when it starts its first fork server."""
    to_child, from_parent = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        to_child.close()
        become_fork_server(from_parent)
    from_parent.close()
    start_process = util.spawnv_passfds

    def hand_over(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return start_process(path, arguments, descriptors)
        util.spawnv_passfds = start_process
        request = {
            "code": arguments[-1],
            "environment": dict(os.environ),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        }
        with to_child:
            socket.send_fds(to_child, [json.dumps(request).encode()], descriptors)
        return pid

    util.spawnv_passfds = hand_over


def become_fork_server(from_parent: socket.socket) -> None:
    """Wait for the request of `hand_over` and become its fork server, or end with the command."""
    try:
        message, descriptors, *_ = socket.recv_fds(from_parent, 1 << 20, 2)
        if message:
            request = json.loads(message)
            os.environ.clear()
            os.environ.update(request["environment"])
            signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
            sys.path.insert(0, "")
            # The server imports this module, which then asks the kernel to end it with its parent.
            sys.modules.pop("lit_attn.cells.fork_server", None)
            numbers = "main({}, {}, ".format(*descriptors)
            exec(re.sub(r"main\(\d+, \d+, ", numbers, request["code"], count=1), {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve()
