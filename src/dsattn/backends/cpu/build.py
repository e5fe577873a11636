"""The C sources, compiled for this machine on first use and loaded.

A library is one source for one dtype. It stands in the cache under the digest of all that it is made of (the sources,
the compiler and the flags) and that of its content. It is written under another name and renamed, so any number of
processes may start at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path

import torch

from dsattn.errors import BackendMissing, DsattnError
from dsattn.wheels import cache_folder, scratch

FOLDER = Path(__file__).parent
FLAGS: tuple[str, ...] = ("-O3", "-std=gnu11", "-fno-strict-aliasing", "-fno-math-errno", "-shared", "-fPIC")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
LEVELS = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}
"""Instruction sets that the sources are written for, best first, and what a compiler is told of them."""
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}

_LIMIT_S = 300
_LOCK = threading.Lock()
_LOADED: dict[tuple[object, ...], ctypes.CDLL | BackendMissing] = {}


def level() -> str:
    """The best of `LEVELS` that this CPU has and PyTorch uses: `ATEN_CPU_CAPABILITY=avx2` or `default` lowers it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "portable"
    found = torch.backends.cpu.get_cpu_capability()
    if found.startswith("AVX512"):
        return "avx512_bf16" if torch.cpu._is_avx512_bf16_supported() else "avx512"
    return "avx2" if found.startswith("AVX2") else "portable"


def dtype_for(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the kernels that take inputs of `dtype`: its own, or fp32 where they have none."""
    if dtype == torch.bfloat16 and level() != "avx512_bf16":
        return torch.float32
    return dtype if dtype in DTYPES else torch.float32


def compiler() -> list[str]:
    """The command of the C compiler: `CC`, as build tools have it, else cc, gcc or clang.

    Raises:
        BackendMissing: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise BackendMissing("C compiler", given=f"CC={os.environ['CC']!r} ({error})", fix="correct CC") from error
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    given = f"no {named[0]}, which CC names" if named else "no cc, gcc or clang on the path"
    raise BackendMissing("C compiler", given=given, fix="install one, e.g. the package gcc, or set CC")


@cache
def about(command: tuple[str, ...]) -> str:
    """The first line of what a compiler says of itself; "" if it says nothing."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def library(source: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The library of a source, built for `dtype` where no process has done that yet.

    Args:
        source: the name of a C file beside this one, without its ending.
        dtype: a key of `DTYPES`.

    Raises:
        BackendMissing: no compiler, a build that fails, or a cache that cannot be written; the message has the cause,
            which is kept: the process does not try again.
    """
    key = source, dtype, level(), FLAGS, os.environ.get("CC")
    with _LOCK:
        if key not in _LOADED:
            try:
                _LOADED[key] = ctypes.CDLL(str(_built(source, dtype)))
            except BackendMissing as error:
                _LOADED[key] = error
            except (DsattnError, OSError, ImportError) as error:
                _LOADED[key] = BackendMissing(f"the library of {source}.c", given=str(error))
        found = _LOADED[key]
    if isinstance(found, BackendMissing):
        raise found
    return found


def _built(source: str, dtype: torch.dtype) -> Path:
    command = compiler()
    flags = [*FLAGS, *LEVELS[level()], f"-D{DTYPES[dtype]}"]
    folder = cache_folder() / "cpu"
    name = f"{source}-{DTYPES[dtype].lower()}-{_digest(command, flags)}"
    # Loading a file that was damaged after it was written may end the process, so it is looked at first.
    for path in folder.glob(f"{name}-*.so"):
        if path.stem.endswith(_content(path)):
            return path
    with scratch(folder) as fresh:
        made = fresh / f"{name}.so"
        whole = [*command, *flags, "-o", str(made), str(FOLDER / f"{source}.c"), "-lm"]
        try:
            done = subprocess.run(whole, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(source, whole, str(error)) from error
        if done.returncode or not made.is_file():
            raise _failed(source, whole, done.stderr.strip() or f"exit code {done.returncode}")
        # Another process may have been faster; a rename replaces its file with the same one, whole.
        return made.replace(folder / f"{name}-{_content(made)}.so")


def _failed(source: str, command: list[str], told: str) -> BackendMissing:
    lines = told.splitlines()
    worst = next((line for line in lines if "error" in line), lines[0] if lines else "nothing was said")
    fix = f"see what this says: {shlex.join(command)}"
    return BackendMissing(f"the build of {source}.c", given=f"{command[0]} fails: {worst}", fix=fix)


def sources_digest() -> str:
    """A digest of all C sources, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _digest(command: list[str], flags: list[str]) -> str:
    parts = [sources_digest(), *command, about(tuple(command)), *flags, platform.machine()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _after_fork() -> None:
    """The lock of a process may have been taken for ever by a thread that its child does not have."""
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
