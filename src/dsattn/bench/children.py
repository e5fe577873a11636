"""Processes that measure, each one thing; started from one that has imported everything, where the system can fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from dsattn.bench.peers.peer import Place
from dsattn.errors import DsattnError

Launch = Callable[[str, Place], dict[str, Any]]
"""Runs a process with a question as JSON, in a place; its answer."""
MODULE = "dsattn.bench.child"
# Elsewhere the libraries that torch loads do not outlive a fork, or there is none.
FORKS = sys.platform == "linux"


class ChildFailed(DsattnError):
    """A process ended without a figure."""


@dataclass(frozen=True)
class _Nursery:
    """A process that forks one for each question.

    Attributes:
        process: the process.
        errors: what it and the others print to stderr.
    """

    process: subprocess.Popen[str]
    errors: IO[str]

    def ask(self, question: str) -> dict[str, Any]:
        """The answer of a process of its own.

        Raises:
            ChildFailed: there is none.
        """
        stdin, stdout = self.process.stdin, self.process.stdout
        if stdin is None or stdout is None:
            raise ChildFailed("the process has no pipes")
        try:
            stdin.write(f"{question}\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        return _answer(line) if line else self._dead()

    def _dead(self) -> dict[str, Any]:
        self.process.wait()
        self.errors.seek(0)
        raise ChildFailed(_last(self.errors.read()) or f"exit code {self.process.returncode}")


class Children:
    """Starts processes; a context manager, which ends what is left of them."""

    def __init__(self) -> None:
        self._nurseries: dict[Place, _Nursery] = {}

    def __call__(self, question: str, place: Place) -> dict[str, Any]:
        """The answer to a question of a process that is there for nothing else.

        Args:
            question: what `dsattn.bench.child` takes.
            place: where it runs.

        Raises:
            ChildFailed: it ended without one; the message has its last words.
        """
        if not FORKS:
            return _run(question, place)
        nursery = self._nurseries.get(place)
        if nursery is None or nursery.process.poll() is not None:
            errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
            process = subprocess.Popen(
                _command(place),
                env=_environment(place),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            nursery = self._nurseries[place] = _Nursery(process, errors)
        return nursery.ask(question)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for nursery in self._nurseries.values():
            # Without questions it ends.
            nursery.process.communicate()
            nursery.errors.close()


def _run(question: str, place: Place) -> dict[str, Any]:
    """The answer of a process that is started for it."""
    command = [*_command(place), question]
    done = subprocess.run(
        command, env=_environment(place), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise ChildFailed(_last(done.stderr) or f"exit code {done.returncode}")
    return _answer(done.stdout)


def _command(place: Place) -> list[str]:
    return [str(place.python), "-m", MODULE]


def _environment(place: Place) -> dict[str, str]:
    import dsattn

    source = os.path.dirname(os.path.dirname(dsattn.__file__))
    path = os.pathsep.join([*map(str, place.path), source])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def _answer(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if "error" in found:
        raise ChildFailed(found["error"])
    return found


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
