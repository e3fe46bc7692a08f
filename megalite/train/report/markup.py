"""HTML and SVG as text in which nothing from outside is ever markup.

`tag` escapes its children and attributes; only what came out of `tag` (or `joined`) goes in as it is. A sample, a path
or a message that holds <script> is therefore shown, not run.
"""

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def joined(parts: Iterable[str]) -> Markup:
    """The parts one after the other, each escaped unless it is markup."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in parts))


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element. `class_` is `class`, `stroke_width` is `stroke-width`; attributes that are None are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children and name in ("rect", "path", "circle", "line", "meta", "br"):
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def number(value: float) -> str:
    """A length in a drawing: two decimals are more than a screen shows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _value(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)
