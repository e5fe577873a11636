"""What the strict build of the documentation does not look at, in the HTML that it made. `make docs` runs this file.

A page must work without a network: nothing that a browser loads by itself may come from another host. What it does load
and what it links to must be there. Links to other hosts are allowed: nobody follows them but the reader.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser fetch something, by element; `a` and `area` wait for a click.
LOADING = ("src", "srcset", "poster", "data", "href", "xlink:href")
CLICKED = ("a", "area")
STYLE_ADDRESS = re.compile(r"@import\s+[\"']([^\"']+)|url\(\s*[\"']?([^\"')]+)")


class Addresses(HTMLParser):
    """The addresses in a page: `loaded` without the reader's doing, and `linked`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self._style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in LOADING:
                addresses = (
                    [part.split()[0] for part in value.split(",") if part.split()] if name == "srcset" else [value]
                )
                (self.linked if tag in CLICKED else self.loaded).extend(addresses)
            elif value is not None and name == "style":
                self.loaded += style_addresses(value)
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loaded += style_addresses(data)


def style_addresses(text: str) -> list[str]:
    """The addresses that a style sheet loads."""
    return [first or second for first, second in STYLE_ADDRESS.findall(text)]


def faults(site: Path) -> list[str]:
    """What is wrong in a built site: an address on another host that is loaded, or a local one that is not there."""
    pages = sorted(site.rglob("*.html"))
    if not pages:
        return [f"{site}: no page"]
    found = []
    for page in pages:
        addresses = Addresses(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: loads {address}" for address in addresses.loaded if is_remote(address)]
        found += dead(site, page, [*addresses.loaded, *addresses.linked])
    for sheet in sorted(site.rglob("*.css")):
        loaded = style_addresses(sheet.read_text(encoding="utf-8"))
        found += [f"{sheet.relative_to(site)}: loads {address}" for address in loaded if is_remote(address)]
        found += dead(site, sheet, loaded)
    return found


def is_remote(address: str) -> bool:
    """Whether an address names a host."""
    return bool(urlsplit(address.strip()).netloc)


def dead(site: Path, source: Path, addresses: list[str]) -> list[str]:
    """The local addresses that lead to no file of the site."""
    found = []
    for address in addresses:
        parts = urlsplit(address.strip())
        if parts.scheme or parts.netloc or not parts.path:
            continue
        path = unquote(parts.path)
        target = site / path.lstrip("/") if path.startswith("/") else source.parent / path
        if not (target / "index.html" if target.is_dir() else target).exists():
            found.append(f"{source.relative_to(site)}: {address} leads nowhere")
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    problems = faults(folder)
    print("\n".join(problems) or f"{folder}: {len(list(folder.rglob('*.html')))} pages, nothing from another host")
    raise SystemExit(bool(problems))
