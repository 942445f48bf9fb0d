"""Reads an HTML page for tests."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Tags, attributes and visible texts of a page. `open` are the tags that are not closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def active(self) -> list[str]:
        """Whatever loads or runs something: elements, handlers of events and references to other files."""
        named = [tag for tag in self.tags if tag in ("script", "link", "iframe", "img", "object")]
        handlers = [name for name, _ in self.attributes if name.startswith("on")]
        references = [value for name, value in self.attributes if name in ("src", "href", "xlink:href")]
        return [*named, *handlers, *(value for value in references if not value.startswith(("#", "./")))]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
