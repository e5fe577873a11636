"""The real wheels of the cuDNN frontend: listed and downloaded by pip, read as text, never installed or imported."""

from __future__ import annotations

import ast
import os
import re
import zipfile
from functools import cached_property
from pathlib import Path, PurePosixPath

from conftest import ROOT
from packaging.version import Version

from dsattn import wheels
from dsattn.backends.cudnn.contracts import Parameter, distribution, releases
from dsattn.backends.cudnn.contracts_table import parameters_of
from dsattn.errors import BadInput
from dsattn.wheels import Unreachable


def cache_folder() -> Path:
    """Where wheels are kept: $DSATTN_CACHE_DIR, in CI the project's .cache, else the user's cache."""
    local = os.environ.get("CI") and not os.environ.get("DSATTN_CACHE_DIR")
    return (ROOT / ".cache" if local else wheels.cache_folder()) / "wheels"


def served() -> list[Version]:
    """The releases on the index that have a DSA, oldest first.

    Raises:
        Unreachable: pip fails, for which the index is the only outside cause here.
    """
    try:
        printed = wheels.pip("index", "versions", distribution()["name"], *wheels.build())
    except BadInput as error:
        raise Unreachable("package index", given=str(error)) from error
    listed = re.search(r"^Available versions:(.*)$", printed, re.MULTILINE)
    found = [Version(text.strip()) for text in listed[1].split(",")] if listed else []
    if not found:
        raise Unreachable(f"no versions listed: {printed}")
    return sorted(version for version in found if version >= releases()[0])


def wheel(version: Version) -> Path:
    """The wheel of a release, downloaded on first use."""
    return wheels.wheel(distribution()["name"], version, cache_folder())


class Sources:
    """The Python sources in a wheel."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))]
            self.texts = {name: archive.read(name).decode() for name in names}
        self.trees: dict[str, ast.Module] = {}

    def tree(self, path: str) -> ast.Module:
        if path not in self.trees:
            self.trees[path] = ast.parse(self.texts[path])
        return self.trees[path]

    def text(self, path: str) -> str:
        """A file of the DSA folder; empty where this release has none."""
        return self.texts.get(f"{self.folder}/{path}", "")

    @cached_property
    def folder(self) -> str:
        return f"{distribution()['module']}/{distribution()['folder']}"

    @cached_property
    def metadata(self) -> str:
        return next(text for name, text in self.texts.items() if name.endswith(".dist-info/METADATA"))

    @cached_property
    def signatures(self) -> dict[str, tuple[Parameter, ...]]:
        """Every public function of the DSA namespace, by the name under which `cudnn.DSA` has it."""
        home = f"{self.folder}/__init__.py"
        symbols = ast.literal_eval(self.definition(home, "_SYMBOLS")[1])
        found = {}
        for symbol, (module, name) in symbols.items():
            path, node = self.definition(self.module(home, module.removeprefix("."), 1), name)
            if isinstance(node, ast.FunctionDef):
                found[symbol] = self.signature(path, node)
        return found

    def signature(self, path: str, function: ast.FunctionDef) -> tuple[Parameter, ...]:
        arguments = function.args
        arguments.defaults = [self.constant(path, default) for default in arguments.defaults]
        arguments.kw_defaults = [default and self.constant(path, default) for default in arguments.kw_defaults]
        found = [Parameter(*parameter) for parameter in parameters_of(arguments)]
        found += [Parameter(f"*{arguments.vararg.arg}", False, None)] if arguments.vararg else []
        found += [Parameter(f"**{arguments.kwarg.arg}", True, None)] if arguments.kwarg else []
        return tuple(found)

    def constant(self, path: str, node: ast.expr) -> ast.expr:
        """A default with the names of module constants followed to their values."""
        if isinstance(node, ast.Name):
            home, value = self.definition(path, node.id)
            return self.constant(home, value) if isinstance(value, ast.expr) else node
        if isinstance(node, ast.Subscript):
            items = self.constant(path, node.value)
            return items.elts[ast.literal_eval(node.slice)] if isinstance(items, ast.Tuple) else node
        return node

    def value(self, path: str, name: str) -> object:
        """The literal that a file of the DSA folder assigns to a name; None where it does not."""
        if not self.text(path):
            return None
        for node in self.tree(f"{self.folder}/{path}").body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
                return ast.literal_eval(node.value)
        return None

    def definition(self, path: str, name: str) -> tuple[str, ast.AST]:
        """Where a module's name is defined, imports followed: the file, and the function, class or assigned value."""
        for node in self.tree(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return path, node
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return path, node.value
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.definition(self.module(path, node.module or "", node.level), alias.name)
        raise LookupError(f"{name} in {path}")

    def module(self, path: str, name: str, level: int) -> str:
        """The file of a module that the file at `path` imports."""
        parents = PurePosixPath(path).parents
        base = parents[level - 1] if level else PurePosixPath()
        place = base.joinpath(*name.split("."))
        return next(found for found in (f"{place}.py", f"{place}/__init__.py") if found in self.texts)
