"""What a function's body shows: where it raises, and which names a call of it reaches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dsattn.drift.snapshot import Site

# Helpers that raise for their caller: `self._value_error_if(condition, message)`, `raise_if(...)`.
_RAISERS = re.compile(r"(^|_)(error|raise)s?_if(_|$)|^_?raise_")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Body:
    """The raise sites of one function, the dotted names that it uses, and what it imports itself.

    `names` leaves out those that the function binds. `imports` is the local name -> (level, module, name).
    """

    sites: list[Site] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    imports: dict[str, tuple[int, str, str]] = field(default_factory=dict)


def body_of(function: Function, where: str) -> Body:
    """What a function's body shows.

    Args:
        function: the parsed function; functions inside it count as part of it.
        where: its name, for the sites.
    """
    found = Body(sites=list(_sites(function.body, "", where)))
    bound, used = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.Name | ast.Attribute):
            used.add(_dotted(node))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.imports[alias.asname or alias.name] = (node.level, node.module or "", alias.name)
    bound -= {"self", "cls"}
    found.names = sorted(name for name in used if name and name.partition(".")[0] not in bound)
    return found


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return before and f"{before}.{node.attr}"
    return None


def _sites(nodes: Iterable[ast.AST], when: str, where: str) -> Iterator[Site]:
    for node in nodes:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            yield from _sites([node.test], when, where)
            yield from _sites(node.body, test, where)
            yield from _sites(node.orelse, _negated(node.test), where)
            continue
        if isinstance(node, ast.ExceptHandler):
            caught = "an error" if node.type is None else ast.unparse(node.type)
            yield from _sites(node.body, f"{caught} is raised", where)
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield _raised(node.exc, when, where)
        elif isinstance(node, ast.Assert):
            says = "" if node.msg is None else message(node.msg)
            yield Site("AssertionError", says, _negated(node.test), where)
        elif isinstance(node, ast.Call):
            yield from _helped(node, when, where)
        yield from _sites(ast.iter_child_nodes(node), when, where)


def _negated(test: ast.expr) -> str:
    return ast.unparse(ast.UnaryOp(ast.Not(), test))


def _raised(error: ast.expr, when: str, where: str) -> Site:
    if not isinstance(error, ast.Call):
        return Site(ast.unparse(error), "", when, where)
    says = message(error.args[0]) if error.args else ""
    return Site(ast.unparse(error.func), says, when, where)


def _helped(call: ast.Call, when: str, where: str) -> Iterator[Site]:
    name = (_dotted(call.func) or "").rpartition(".")[2]
    if not _RAISERS.search(name):
        return
    if "_if" in name and len(call.args) >= 2:
        yield Site(name, message(call.args[1]), ast.unparse(call.args[0]), where)
    else:
        yield Site(name, message(call.args[0]) if call.args else "", when, where)


def message(node: ast.expr) -> str:
    """What a message says, with {expressions} where it is put together."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(message(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left) + message(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"
