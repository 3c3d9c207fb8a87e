"""Facts about this machine that explain its results: devices, versions, MPS, SLURM, disk, locks."""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import torch

import lit_attn
from lit_attn.schema.sources import PACKAGE, hash_source, list_modules

GIB = 2**30
DRIVER_TIMEOUT = 10.0
"""Seconds after which nvidia-smi, which can hang with its driver, is no longer awaited."""


def describe_machine(runs: Path) -> dict[str, str]:
    """Return the facts by name, in the order in which they are printed; `runs` holds the cells."""
    facts = {
        "lit_attn": lit_attn.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }
    facts["python"] = platform.python_version()
    facts["torch"] = torch.__version__
    facts["CUDA"] = torch.version.cuda or "torch is built without it"
    facts["driver"] = _read_driver()
    facts["NCCL"] = _read_nccl()
    facts["Triton"] = _read_version("triton")
    facts["processor"] = f"{describe_device('cpu')}, {os.cpu_count()} cores"
    for index in range(torch.cuda.device_count()):
        facts[f"GPU {index}"] = _describe_gpu(index)
    if torch.cuda.device_count() == 0:
        facts["GPU"] = "none that torch can use"
    facts["MPS"] = _describe_mps()
    facts["SLURM"] = _describe_slurm()
    facts["free disk"] = f"{_count_free_bytes(runs) / GIB:,.0f} GiB for {runs}/"
    facts["locks"] = _describe_locks(runs)
    return facts


def describe_device(kind: str) -> str:
    """Return name and capability of the current device of type `kind` ("cpu" or "cuda")."""
    if kind == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor}"
    return f"CPU {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def hash_attention_code() -> str:
    """Return 12 hexadecimal digits that identify the code of lit_attn.attention."""
    digest = hashlib.sha256()
    for name, source in list_modules(PACKAGE / "attention").items():
        digest.update(name.encode())
        digest.update(hash_source(source))
    return digest.hexdigest()[:12]


def _describe_gpu(index: int) -> str:
    """Return name, capability and memory of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    memory = properties.total_memory / GIB
    return f"{properties.name} sm_{properties.major}{properties.minor}, {memory:.0f} GiB"


def _read_driver() -> str:
    """Return the version of NVIDIA's driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi fails"
    return ", ".join(sorted(set(done.stdout.split())))


def _read_nccl() -> str:
    """Return the version of NCCL, which torch needs for several GPUs."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return "not used"
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def _read_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _describe_mps() -> str:
    """Return whether the daemon of CUDA MPS runs, which lets processes share a GPU at once."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return "its daemon runs" if (folder / "control").exists() else "its daemon does not run"


def _describe_slurm() -> str:
    """Return whether jobs can be submitted, and whether this process belongs to a job."""
    if "SLURM_JOB_ID" in os.environ:
        return "this is a job"
    return "jobs can be submitted" if shutil.which("sbatch") else "no sbatch"


def _count_free_bytes(folder: Path) -> int:
    """Return the free space of the file system that `folder` is or will be on."""
    return shutil.disk_usage(_find_existing(folder)).free


def _find_existing(folder: Path) -> Path:
    """Return the nearest folder above that exists, or `folder` itself."""
    candidates = [folder, *folder.absolute().parents]
    return next(path for path in candidates if path.is_dir())


def _describe_locks(folder: Path) -> str:
    """Return whether file locks work where the cells are: two runners must not train one cell."""
    try:
        with tempfile.NamedTemporaryFile(dir=_find_existing(folder)) as file:
            linked = Path(f"{file.name}.link")
            try:
                os.link(file.name, linked)
            finally:
                linked.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            with Path(file.name).open("rb") as other, contextlib.suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return LOCKS_FAIL
    except OSError as error:
        return f"{LOCKS_FAIL}: {error.strerror}"
    return "work"


LOCKS_FAIL = "do not work on this file system"
