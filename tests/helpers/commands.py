"""Commands of the package in new processes that need not import PyTorch and Lightning again.

The imports take up to ten seconds of a slow core. So each process of pytest starts one server that
imports them, and every command is a fork of this server. A command sees nothing of the test or of
another command: it starts with the modules of the package as they are after their import. Its
parent is one more fork, which waits for its end. A fork that went through all imported objects, as
Python does when it ends, would copy their memory, which takes seconds, too.

A command that trains cells starts a fork server of its own (lit_attn/ablate/launch.py), which would
import everything again. In these tests this fork server is a child of the command that was forked
before the command began.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any, NoReturn

from helpers.paths import ROOT


def run_python(folder: Path, *words: str, **environment: str) -> CompletedProcess[str]:
    """Run `python -m MODULE ...`, `python SCRIPT ...` or `python -c CODE ...` in the folder."""
    changed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = (out.fileno(), err.fileno())
        command = start_python(folder, words, os.environ | changed | environment, *files)
        code = command.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return CompletedProcess(words, code, *texts)


def run_new_python(folder: Path, *words: str, **environment: str) -> CompletedProcess[str]:
    """Run `python WORDS ...` in the folder, in a new interpreter that has imported nothing."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


class Command:
    """A started command, with the methods of `subprocess.Popen` that the tests use.

    Another process is its parent and sends its exit code through `end`. `stdout` is the end of its
    pipe, if it has one.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self.pid = int(self._read_line())

    def _read_line(self) -> str:
        """Return the next line of the parent."""
        line = b""
        while not line.endswith(b"\n"):
            read = self.end.recv(1)
            if not read:
                raise RuntimeError("the parent of a command has ended")
            line += read
        return line.decode()

    def poll(self) -> int | None:
        """Return the exit code, or None if the command runs."""
        if self.returncode is None and select.select([self.end], [], [], 0)[0]:
            self.returncode = int(self._read_line())
            self.end.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        if self.returncode is None and not select.select([self.end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return the output up to its end, and wait for the end of the command."""
        assert self.stdout is not None
        with self.stdout:
            output = self.stdout.read()
        self.wait(timeout)
        return output, None

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_python(
    folder: Path,
    words: tuple[str, ...],
    environment: dict[str, str],
    out: int,
    err: int,
    is_leader: bool = False,
) -> Command:
    """Start `python WORDS ...` in the folder with this environment and these files for output.

    `is_leader`: in a new session, as a terminal does.
    """
    request = {
        "words": words,
        "folder": str(folder),
        "environment": environment,
        "is_leader": is_leader,
    }
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(start_server(), [json.dumps(request).encode()], [out, err, theirs.fileno()])
    return Command(ours)


def start_with_pipe(
    folder: Path, words: tuple[str, ...], environment: dict[str, str], is_leader: bool = False
) -> Command:
    """Start `python WORDS ...` as `start_python`, with a pipe for both of its outputs."""
    reading, writing = os.pipe()
    command = start_python(folder, words, environment, writing, writing, is_leader)
    os.close(writing)
    command.stdout = os.fdopen(reading, encoding="utf-8")
    return command


@functools.cache
def start_server() -> socket.socket:
    """Start the server of this process, which ends when the returned socket is closed."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    number = str(theirs.fileno())
    command = [sys.executable, "-m", "helpers.commands", number]
    server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        server.wait()

    atexit.register(end)
    return ours


def serve(requests: socket.socket) -> NoReturn:
    """Fork a process for each request, which runs the command in a child process of its own."""
    from lit_attn.ablate.launch import TRAINING

    for module in TRAINING:
        importlib.import_module(module)
    # The garbage collector of a fork leaves these objects alone.
    gc.freeze()
    sys.path.remove(str(ROOT / "tests"))
    # The kernel collects the parents of commands.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            # nanobind lists what is frozen when Python ends.
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            if _is_command(*descriptors):
                end_after(functools.partial(become, **json.loads(message), files=descriptors[:2]))
        for number in descriptors:
            os.close(number)


def _is_command(out: int, err: int, descriptor: int) -> bool:
    """Return True in a new child process; send its pid and its exit code from this process."""
    end = socket.socket(fileno=descriptor)
    child = os.fork()
    if child == 0:
        end.close()
        return True
    # Whoever reads the output waits until no process has it.
    os.close(out)
    os.close(err)
    end.sendall(f"{child}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end.sendall(f"{code}\n".encode())
    os._exit(0)


def end_after(run: Callable[[], None]) -> NoReturn:
    """End this process after `run` as Python does, but free no modules."""
    code = 0
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code & 0xFF)


def become(
    words: list[str],
    folder: str,
    environment: dict[str, str],
    is_leader: bool,
    files: list[int],
) -> None:
    """Run a command in this process as a new interpreter would."""
    if is_leader:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    streams = (os.open(os.devnull, os.O_RDONLY), *files)
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    # Those of the server believe that they can be searched, as its own files can.
    encoding, _, errors = environment.get("PYTHONIOENCODING", "").partition(":")
    options: dict[str, Any] = {"encoding": encoding or None, "errors": errors or None}
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", **options)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.chdir(folder)
    searched = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path]
    sys.path[:0] = [path for path in searched if path not in sys.path]
    prepare_fork_server()
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(words[1], vars(main))
    elif words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        # Python warns of a program that has been imported before it runs.
        sys.modules.pop(words[1], None)
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
    serve(socket.socket(fileno=int(sys.argv[1])))
