"""What pages are made of: tiles, tables, cards, a whole document."""

import time
from collections.abc import Iterable, Sequence

from megalite.train.report.markup import Markup, joined, tag
from megalite.train.report.style import STYLE

# Nothing is loaded and nothing runs, whatever a page holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, *body: str) -> str:
    """A whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def section(name: str, title: str, *parts: str) -> Markup:
    """A part of a page with its heading; `name` is what links lead to."""
    return tag("section", tag("h2", title), *parts, id=name)


def links(names: Iterable[tuple[str, str]]) -> Markup:
    """(name, title) of the sections of the page."""
    return tag("nav", *(tag("a", title, href=f"#{name}") for name, title in names), aria_label="sections")


def cards(*parts: str) -> Markup:
    return tag("div", *parts, class_="cards")


def card(title: str, *parts: str, wide: bool = False) -> Markup:
    heading = [tag("h3", title)] if title else []
    return tag("div", *heading, *parts, class_="card wide" if wide else "card")


def tiles(figures: Iterable[tuple[str, str, str]]) -> Markup:
    """(label, figure, what is said below it), those with a figure."""
    parts = [
        tag("div", tag("dt", label), tag("dd", figure, *([tag("small", below)] if below else [])))
        for label, figure, below in figures
        if figure
    ]
    return tag("dl", *parts, class_="tiles")


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """A table of labels and texts."""
    body = [tag("tr", tag("th", label, scope="row"), tag("td", text)) for label, text in rows]
    return tag("div", tag("table", tag("tbody", *body)), class_="scroll")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = False) -> Markup:
    """A table whose first column names the rows; `figures`: the others are numbers."""
    style = "figure" if figures else None
    top = [tag("th", name, scope="col", class_=style if at else None) for at, name in enumerate(head)]
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell, class_=style) for cell in row[1:])) for row in rows
    ]
    return tag("div", tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body)), class_="scroll")


def folded(summary: str, *parts: str, unfolded: bool = False) -> Markup:
    return tag("details", tag("summary", summary), *parts, open="" if unfolded else None)


def quoted(beginning: str, text: str) -> Markup:
    """What a model wrote, after what it was given."""
    return tag("pre", tag("b", beginning), text, class_="sample")


def listed(parts: Iterable[str], separator: str = " ") -> Markup:
    """Parts with something in between."""
    found = list(parts)
    return joined([part for at, each in enumerate(found) for part in ([separator, each] if at else [each])])


def moment(seconds: float) -> str:
    """A time for people, where the machine is."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
