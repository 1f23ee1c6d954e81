"""Strict parser of HTML pages."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Parser that fails if tags are closed out of order, and records attributes and what a browser would fetch."""

    VOID = frozenset({"meta", "line", "path", "br", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags
