"""The documents tell the truth: the README's Python blocks run, and every relative link leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def text_of(document: str) -> str:
    path = ROOT / document
    return path.read_text(encoding="utf-8") if path.exists() else ""


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Every Python block as (line of its first statement, source)."""
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


def run_block(document: str, line: int, source: str) -> None:
    """Runs a block in a namespace of its own; a traceback shows the lines of the document."""
    exec(compile("\n" * (line - 1) + source, document, "exec"), {"__name__": "__main__"})


def dead_links(text: str, folder: Path) -> list[str]:
    """The relative links that lead to no file."""
    links = [first or second for first, second in LINK.findall(text)]
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    return [link for link in local if not (folder / link).exists()]


@pytest.mark.parametrize(
    ("line", "source"), [pytest.param(*block, id=f"line{block[0]}") for block in python_blocks(text_of("README.md"))]
)
def test_readme_block_runs(line: int, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run_block("README.md", line, source)


def test_readme_has_a_block() -> None:
    assert python_blocks(text_of("README.md"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert (ROOT / document).exists()
    assert dead_links(text_of(document), ROOT) == []


def test_a_wrong_block_is_found() -> None:
    text = "words\n\n```python\nx = 1\nassert x == 2, 'told'\n```\n\n```sh\nfalse\n```\n\n```python\nx\n```\n"
    (first, second) = python_blocks(text)
    with pytest.raises(AssertionError, match="told") as caught:
        run_block("made-up.md", *first)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == ("made-up.md", 4)
    with pytest.raises(NameError):
        run_block("made-up.md", *second)


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = '[a](there.md#part) [b](#part) [c](https://x.org/gone) ![d](gone.png) <img src="lost.svg">'
    assert dead_links(text, tmp_path) == ["gone.png", "lost.svg"]
