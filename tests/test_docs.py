"""The documents tell the truth: their Python runs and prints what they say, links lead to files, nothing is left out.

One rule for README.md and every page of docs/: the Python blocks of a document run in order in one namespace, in a
fresh interpreter and an empty folder. A `text` block right after a Python block is what that block prints, to the
letter; a block without one prints nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from built_docs import faults
from conftest import ROOT, RunPython

import dsattn
from dsattn.cli import main

PAGES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = "docs/api.md"
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def text_of(document: str) -> str:
    path = ROOT / document
    return path.read_text(encoding="utf-8") if path.exists() else ""


def program_of(text: str) -> tuple[str, str]:
    """All Python blocks of a document, each on its own lines of it, and what they print."""
    program, printed, end = "", "", None
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            program += "\n" * (text.count("\n", 0, match.start(2)) - program.count("\n")) + match[2]
            end = match.end()
        elif match[1] == "text" and end is not None and not text[end : match.start()].strip():
            printed += match[2]
            end = None
    return program, printed


def run_document(text: str, run_python: RunPython, folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a document's Python; tracebacks have the document's lines."""
    script = folder / "document.py"
    script.write_text(program_of(text)[0], encoding="utf-8")
    done = run_python(str(script), cwd=folder)
    return done.returncode, done.stdout, done.stderr


def dead_links(text: str, folder: Path) -> list[str]:
    """The relative links that lead to no file; what stands in a block or in backticks is no link."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))
    links = [first or second for first, second in LINK.findall(text)]
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    return [link for link in local if not (folder / link).exists()]


def missing_words(words: list[str], text: str) -> list[str]:
    """The words that a text does not have; a longer word that holds one does not count."""
    return [word for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)]


def options(capsys: pytest.CaptureFixture[str], command: str) -> list[str]:
    """The options that `--help` of a command lists."""
    assert main([command, "--help"]) == 0
    return sorted(set(OPTION.findall(capsys.readouterr().out)))


@pytest.mark.parametrize("document", ["README.md", *PAGES])
def test_python_of_a_document_runs(document: str, run_python: RunPython, tmp_path: Path) -> None:
    program, printed = program_of(text_of(document))
    if not program:
        return
    code, out, err = run_document(text_of(document), run_python, tmp_path)
    assert code == 0, err.replace(str(tmp_path / "document.py"), document)
    assert out == printed


def test_the_documents_have_python() -> None:
    without = [document for document in ["README.md", *PAGES] if not program_of(text_of(document))[0]]
    assert without == [REFERENCE]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    assert (ROOT / document).exists()
    assert dead_links(text_of(document), (ROOT / document).parent) == []


def test_every_public_name_is_explained_and_has_its_reference() -> None:
    told = "\n".join(text_of(page) for page in PAGES if page != REFERENCE)
    assert missing_words(dsattn.__all__, told) == []
    # By a longer path where a module has the name.
    referred = re.findall(r"^::: dsattn\.(?:[\w.]+\.)?(\w+)$", text_of(REFERENCE), re.MULTILINE)
    assert sorted(referred) == sorted(dsattn.__all__)


@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(capsys, command)
    assert "--json" in found
    assert missing_words(found, text_of("docs/verify.md")) == []


def test_no_option_is_explained_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    known = {*options(capsys, "verify"), *options(capsys, "doctor"), "--help", "--version"}
    assert sorted(set(OPTION.findall(text_of("docs/verify.md"))) - known) == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of("mkdocs.yml").partition("\nnav:\n")[2]
    assert sorted(re.findall(r"^  - .*?([\w/-]+\.md)$", navigation, re.MULTILINE)) == [
        page.removeprefix("docs/") for page in PAGES
    ]


def test_wrong_python_is_found(run_python: RunPython, tmp_path: Path) -> None:
    text = "words\n\n```python\nx = 1\n```\n\n```sh\nfalse\n```\n\n```python\nassert x == 2, 'told'\n```\n"
    code, _, err = run_document(text, run_python, tmp_path)
    assert code == 1
    assert 'document.py", line 12' in err
    assert "told" in err


def test_wrong_output_is_found(run_python: RunPython, tmp_path: Path) -> None:
    text = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nprint(2)\n```\n\nwords\n\n```text\n3\n```\n"
    assert program_of(text)[1] == "1\n"
    assert run_document(text, run_python, tmp_path) == (0, "1\n2\n", "")


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    text = '[a](there.md#part) [b](#part) [c](https://x.org/gone) ![d](gone.png) <img src="lost.svg"> `x[0](y)`\n'
    text += "```python\nx[0](y)\n```\n"
    assert dead_links(text, tmp_path) == ["gone.png", "lost.svg"]


def test_a_missing_word_is_found() -> None:
    text = "`explain(...)` and --json-lines, TopKey\n`--list`"
    assert missing_words(["explain", "TopK", "--json", "--list"], text) == ["TopK", "--json"]
    assert OPTION.findall(text) == ["--json-lines", "--list"]


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<a href="https://x.org/">x</a><a href="#top">x</a><a href="mailto:a@b">x</a>', []),
        ('<img src="dot.png"><a href="part/">x</a><a href="/part/index.html?q#r">x</a>', []),
        ('<script src="https://x.org/x.js"></script>', ["loads https://x.org/x.js"]),
        ('<script src="//x.org/x.js"></script>', ["loads //x.org/x.js"]),
        ('<link rel="stylesheet" href="http://x.org/x.css">', ["loads http://x.org/x.css"]),
        ('<img srcset="dot.png 1x, https://x.org/2.png 2x">', ["loads https://x.org/2.png"]),
        ("<style>@import 'https://x.org/f.css';</style>", ["loads https://x.org/f.css"]),
        ('<p style="background: url(https://x.org/b.png)">x</p>', ["loads https://x.org/b.png"]),
        ('<img src="gone.png"><a href="gone/">x</a>', ["gone.png leads nowhere", "gone/ leads nowhere"]),
    ],
)
def test_faults_of_a_built_page_are_found(page: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("dot.png", "part/index.html"):
        (tmp_path / name).touch()
    (tmp_path / "index.html").write_text(page)
    assert faults(tmp_path) == [f"index.html: {fault}" for fault in found]


def test_faults_of_a_style_sheet_and_an_empty_site_are_found(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path}: no page"]
    (tmp_path / "index.html").touch()
    (tmp_path / "a.css").write_text("@font-face { src: url(https://x.org/f.woff2), url('gone.woff2'), url(data:x) }")
    assert faults(tmp_path) == ["a.css: loads https://x.org/f.woff2", "a.css: gone.woff2 leads nowhere"]
