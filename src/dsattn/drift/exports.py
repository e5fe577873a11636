"""What Python sources export, read by griffe: signatures, docstrings and raise sites; nothing is imported or run."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import griffe

from dsattn.drift.annotations import normal
from dsattn.drift.bodies import Body, body_of
from dsattn.drift.snapshot import VAR_KEYWORD, VAR_POSITIONAL, Exported, Parameter, Site

_OWN = "dsattn"
_DEEPEST = 8
_STARS = {VAR_POSITIONAL: "*", VAR_KEYWORD: "**"}


class _Nodes(griffe.Extension):
    """Keeps the parsed source of each function."""

    def on_function_instance(self, *, node: ast.AST | griffe.ObjectNode, func: griffe.Function, **_: Any) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            func.extra[_OWN]["node"] = node


class Sources:
    """Unpacked sources, loaded by griffe without importing them.

    Args:
        folder: where they are.
        part: the package in it that is read; empty for all at the top.
    """

    def __init__(self, folder: Path, part: str) -> None:
        # What griffe cannot follow is no news here.
        logging.getLogger("griffe").setLevel(logging.CRITICAL)
        extensions = griffe.load_extensions(_Nodes())
        self.loader = griffe.GriffeLoader(search_paths=[folder], extensions=extensions, allow_inspection=False)
        found = sorted(path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py")
        self.roots = [part.replace("/", ".")] if part and found else found
        self.modules = [self.loader.load(root, try_relative_path=False) for root in self.roots]
        self._bodies: dict[str, Body] = {}
        self._links: dict[str, list[Any]] = {}

    def exported(self) -> Iterator[Exported]:
        """Every name that callers can reach, and the public methods of classes."""
        for root, module in zip(self.roots, self.modules, strict=True):
            prefix = "" if len(self.roots) == 1 else f"{root}."
            for name, path in self._table(module).items():
                found = self._object(path)
                home = path.removeprefix(f"{root}.")
                yield self._described(prefix + name, home, found)
                if isinstance(found, griffe.Class):
                    yield from self._methods(f"{prefix}{name}", home, found)

    def files(self) -> set[Path]:
        """The files that were read."""
        todo, found = [*self.modules], set()
        while todo:
            at = todo.pop()
            found.add(at.filepath)
            todo += [each for each in at.members.values() if isinstance(each, griffe.Module)]
        return found

    def _table(self, module: Any) -> dict[str, str]:
        """Exported name -> the path behind it: a lazy table, else `__all__`, else all that is public."""
        lazy = self._lazy(module)
        if lazy:
            return lazy
        if module.exports:
            return {str(name): f"{module.path}.{name}" for name in module.exports}
        found = {}
        for path, target in _public(module):
            each = self._object(target)
            if isinstance(each, griffe.Function | griffe.Class):
                found[path] = each.path
        # What is exported again elsewhere is called from there.
        again = {target for path, target in found.items() if path != target}
        return {
            path.removeprefix(f"{module.path}."): target
            for path, target in found.items()
            if path != target or target not in again
        }

    def _lazy(self, module: Any) -> dict[str, str]:
        """The table by which a module's `__getattr__` finds its names: name -> (module, name), or -> module."""
        if "__getattr__" not in module.members:
            return {}
        for member in module.members.values():
            if not (isinstance(member, griffe.Attribute) and isinstance(member.value, griffe.ExprDict)):
                continue
            try:
                table = ast.literal_eval(str(member.value))
            except ValueError:
                continue
            places = {name: (place, name) if isinstance(place, str) else place for name, place in table.items()}
            if places and all(_is_place(place) for place in places.values()):
                return {name: f"{_absolute(module.path, *place)}" for name, place in places.items()}
        return {}

    def _object(self, path: str) -> Any:
        """What stands at a path, imports followed; None where the sources do not show it."""
        try:
            found = self.loader.modules_collection.get_member(path)
            return found.final_target if found.is_alias else found
        except (KeyError, griffe.GriffeError):
            return None

    def _described(self, name: str, home: str, found: Any) -> Exported:
        docstring = "" if found is None or found.docstring is None else found.docstring.value
        if found is None or not isinstance(found, griffe.Function | griffe.Class):
            return Exported(name, "unknown" if found is None else "value", home, docstring=docstring)
        kind = "function" if isinstance(found, griffe.Function) else "class"
        maker = found if isinstance(found, griffe.Function) else _members(found).get("__init__")
        parameters: tuple[Parameter, ...] = ()
        if maker is not None:
            parameters = tuple(self._parameter(each, maker) for each in maker.parameters)
            if parameters and parameters[0].name in ("self", "cls") and isinstance(maker.parent, griffe.Class):
                parameters = parameters[1:]
        return Exported(
            name=name,
            kind=kind,
            home=home,
            parameters=parameters,
            returns=None if isinstance(found, griffe.Class) or found.returns is None else normal(str(found.returns)),
            docstring=docstring,
            sites=() if maker is None else self._reached(maker),
        )

    def _methods(self, owner: str, home: str, found: griffe.Class) -> Iterator[Exported]:
        for name, method in _members(found).items():
            if not name.startswith("_") or name == "__call__":
                yield replace(self._described(f"{owner}.{name}", f"{home}.{name}", method), kind="method")

    def _parameter(self, parameter: Any, scope: Any) -> Parameter:
        default = None if parameter.default is None else self._settled(str(parameter.default), scope)
        annotation = None if parameter.annotation is None else normal(str(parameter.annotation))
        kind = parameter.kind.value
        stars = _STARS.get(kind, "")
        return Parameter(stars + parameter.name, kind, None if stars else default, annotation)

    def _settled(self, text: str, scope: Any, depth: int = 0) -> str:
        """An expression with the names of module constants followed to their values."""
        tree = ast.parse(text, mode="eval")
        if depth == _DEEPEST:
            return ast.unparse(tree)

        def value_of(name: str) -> ast.expr | None:
            first, _, rest = name.partition(".")
            try:
                path = scope.resolve(first) + (rest and f".{rest}")
            except griffe.NameResolutionError:
                return None
            found = self._object(path)
            if not isinstance(found, griffe.Attribute) or found.value is None:
                return None
            return ast.parse(self._settled(str(found.value), found.parent, depth + 1), mode="eval").body

        return ast.unparse(_Constants(value_of).visit(tree))

    def _reached(self, function: Any) -> tuple[Site, ...]:
        """The raise sites that a call can reach, as far as names tell: a class stands for all of its methods."""
        seen: set[str] = set()
        todo = [function]
        sites: dict[Site, None] = {}
        while todo:
            at = todo.pop()
            if at.path not in seen:
                seen.add(at.path)
                sites |= dict.fromkeys(self._body(at).sites)
                todo += self._used(at)
        return tuple(sorted(sites, key=lambda site: (site.where, site.error, site.says, site.when)))

    def _body(self, at: Any) -> Body:
        if at.path not in self._bodies:
            node = at.extra[_OWN].get("node")
            self._bodies[at.path] = Body() if node is None else body_of(node, at.path)
        return self._bodies[at.path]

    def _used(self, at: Any) -> list[Any]:
        """The functions and classes that a function's body names, or a class consists of."""
        if at.path not in self._links:
            if isinstance(at, griffe.Class):
                found = list(_members(at).values())
            else:
                body = self._body(at)
                found = [self._object(path) for name in body.names for path in _paths(at, name, body)]
            self._links[at.path] = [each for each in found if isinstance(each, griffe.Function | griffe.Class)]
        return self._links[at.path]


class _Constants(ast.NodeTransformer):
    """Puts values in the place of names, and takes items out of tuples that are now literal."""

    def __init__(self, value_of: Callable[[str], ast.expr | None]) -> None:
        self.value_of = value_of

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The value of a constant."""
        return self.value_of(node.id) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """The value of a constant of another module."""
        return self.value_of(ast.unparse(node)) or node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """An item of a tuple or list."""
        items, index = self.visit(node.value), node.slice
        if not (isinstance(items, ast.Tuple | ast.List) and isinstance(index, ast.Constant)):
            return node
        place = index.value
        return items.elts[place] if isinstance(place, int) and place < len(items.elts) else node


def _public(module: Any, top: Any = None) -> Iterator[tuple[str, str]]:
    """(path, path of what stands there) of every public function and class of a package, and of its re-exports."""
    top = top or module
    # Submodules come in the order of the file system.
    for member in sorted(
        module.members.values(), key=lambda each: each.name if isinstance(each, griffe.Module) else ""
    ):
        path = f"{module.path}.{member.name}"
        if member.is_alias:
            inside = member.target_path.startswith(f"{top.path}.")
            if module.is_init_module and inside and not member.name.startswith("_"):
                yield path, member.target_path
        elif isinstance(member, griffe.Module) and member.is_public:
            yield from _public(member, top)
        elif isinstance(member, griffe.Function | griffe.Class) and member.is_public:
            yield path, member.path


def _members(found: griffe.Class) -> dict[str, griffe.Function]:
    """The methods of a class, inherited ones included where the sources have them."""
    methods = {}
    for name, member in found.all_members.items():
        try:
            target = member.final_target if isinstance(member, griffe.Alias) else member
        except griffe.GriffeError:
            continue
        if isinstance(target, griffe.Function):
            methods[name] = target
    return methods


def _is_place(place: object) -> bool:
    return isinstance(place, tuple) and len(place) == 2 and all(isinstance(part, str) for part in place)


def _absolute(package: str, module: str, name: str) -> str:
    """The path of a name in a module that a package's code calls `module`, with dots in front where it is relative."""
    relative = module.lstrip(".")
    up = len(module) - len(relative)
    if up:
        base = package.split(".")
        relative = ".".join([*base[: len(base) - up + 1], *([relative] if relative else [])])
    return f"{relative}.{name}"


def _paths(function: Any, name: str, body: Body) -> Iterator[str]:
    """The paths that a name in a function's body may stand for."""
    first, _, rest = name.partition(".")
    rest = rest and f".{rest}"
    if first in ("self", "cls") and isinstance(function.parent, griffe.Class):
        yield f"{function.parent.path}{rest}"
    elif first in body.imports:
        level, module, imported = body.imports[first]
        package = function.module if function.module.is_init_module else function.module.parent
        yield _absolute(package.path, "." * level + module, imported) + rest
    else:
        try:
            yield f"{function.resolve(first)}{rest}"
        except griffe.NameResolutionError:
            return
