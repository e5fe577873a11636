"""Annotations as text in one spelling, and what one allows beside another."""

from __future__ import annotations

import ast


def normal(text: str) -> str:
    """An annotation with `Optional[A]` and `Union[A, B]` as `A | None` and `A | B`, quotes gone."""
    try:
        return ast.unparse(_Unions().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return text


def widens(before: str | None, after: str | None) -> bool:
    """Whether all that an annotation names is named by the later one, too."""
    if before is None or after is None:
        return after is None
    return _members(before) <= _members(after)


def _members(text: str) -> set[str]:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return {text}
    members = set()
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        members.add(ast.unparse(node.right))
        node = node.left
    return members | {ast.unparse(node)}


class _Unions(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Unquotes."""
        if not isinstance(node.value, str):
            return node
        try:
            return self.visit(ast.parse(node.value, mode="eval").body)
        except SyntaxError:
            return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Rewrites unions; the words inside `Literal` are no annotations."""
        name = ast.unparse(node.value).rpartition(".")[2]
        if name == "Literal":
            return node
        node = ast.Subscript(node.value, self.visit(node.slice), node.ctx)
        if name == "Optional":
            return ast.BinOp(node.slice, ast.BitOr(), ast.Constant(None))
        if name == "Union" and isinstance(node.slice, ast.Tuple):
            first, *others = node.slice.elts
            for other in others:
                first = ast.BinOp(first, ast.BitOr(), other)
            return first
        return node
