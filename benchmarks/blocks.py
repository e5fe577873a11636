"""Tables between marks in the documents, written by the scripts of this folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def replaced(text: str, name: str, block: str) -> str:
    """A document with another block between `<!-- NAME table -->` and `<!-- /NAME table -->`."""
    begin, end = f"<!-- {name} table -->", f"<!-- /{name} table -->"
    changed, count = re.subn(f"{begin}.*{end}", lambda _: f"{begin}\n{block}\n{end}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the document has {count} blocks between {begin} and {end}, not one")
    return changed


def write(path: Path, blocks: dict[str, str]) -> None:
    """Replaces some blocks of a document by name."""
    text = path.read_text()
    for name, block in blocks.items():
        text = replaced(text, name, block)
    path.write_text(text)


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"
