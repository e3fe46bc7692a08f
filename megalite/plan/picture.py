"""Pictures as SVG. Shapes have classes of picture.css, so that a report shows the same pictures in its own colours.

Equal pictures give equal files. Lengths are pixels from the upper left corner.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

from megalite.config.durable_files import write_atomically
from megalite.config.own_files import output_problems, picture_of
from megalite.errors.problems import Problem, UserError, printable

SETTING = "--picture"
MARGIN = 16  # around a picture that is a file
STYLE = Path(__file__).with_name("picture.css")


class Picture:
    """A picture that grows shape by shape; `width` and `height` are set once the shapes are known."""

    def __init__(self, title: str) -> None:
        self.title, self.width, self.height = title, 0.0, 0.0
        self._shapes: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
        self._shapes.append(f'<rect {place} class="{style}"/>')

    def path(self, line: str, style: str, opacity: float = 1.0) -> None:
        faint = f' opacity="{opacity:.3g}"' if opacity < 1 else ""
        self._shapes.append(f'<path d="{line}" class="{style}"{faint}/>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        self._shapes.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}">{escape(printable(words))}</text>')

    def place(self, other: "Picture", x: float, y: float) -> None:
        """Show another picture with its upper left corner at this place."""
        self._shapes += [f'<g transform="translate({x:.5g} {y:.5g})">', *other._shapes, "</g>"]

    def svg(self) -> str:
        """The element of a page, which has the style."""
        look = f'class="picture" role="img" style="max-width:{self.width:.0f}px"'
        return self._element(f'{look} viewBox="0 0 {self.width:.0f} {self.height:.0f}"')

    def file(self, command: str) -> str:
        """An SVG file, which holds the style and names the command that drew it."""
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"'
        about = f"<metadata><dc:title>megalite {command}</dc:title></metadata>"
        width, height = self.width + 2 * MARGIN, self.height + 2 * MARGIN
        box = f'viewBox="{-MARGIN} {-MARGIN} {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        background = f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
        style = f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
        element = self._element(f'{spaces} class="picture" {box}', about, style, background)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{element}\n'

    def _element(self, attributes: str, *head: str) -> str:
        title = f"<title>{escape(printable(self.title))}</title>"
        return "\n".join([f"<svg {attributes}>{title}", *head, *self._shapes, "</svg>"])


def picture_problems(path: Path, command: str) -> list[Problem]:
    """Why a command cannot draw to `path` (--picture), known before anything is drawn."""
    problems = []
    if path.suffix.lower() != ".svg":
        problems.append(Problem(SETTING, str(path), "must end in .svg", f"{SETTING}=picture.svg"))
    if not path.parent.is_dir():
        rule = f"the folder {path.parent} does not exist"
        problems.append(Problem(SETTING, str(path), rule, "make it, or another"))
    return problems or output_problems(SETTING, path, picture_of(command))


def save_picture(draw: Callable[[], Picture], path: Path, command: str) -> None:
    """Draw to a file, which appears only when it is complete."""
    try:
        write_atomically(path, draw().file(command).encode(), picture_of(command))
    except OSError as error:
        raise UserError(Problem(SETTING, str(path), f"cannot be written: {error}", "another file")) from error
