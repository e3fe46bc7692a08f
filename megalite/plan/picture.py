"""Pictures as SVG. Shapes have classes of picture.css, so that a report shows the same pictures in its own colours.

Equal pictures give equal files. Lengths are pixels from the upper left corner.
"""

from collections.abc import Callable
from html import escape
from pathlib import Path

from megalite.config.files import Kind, output_problems, write_atomically
from megalite.errors.problems import Problem, UserError, printable

SETTING = "--picture"
LETTER = 6.4  # width of a letter, about
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
        self._shapes.append(f'<path d="{line}" class="{style}" opacity="{opacity:.3g}"/>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        self._shapes.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{style}">{escape(printable(words))}</text>')

    def svg(self) -> str:
        """The element of a page, which has the style."""
        width, title = f"{self.width:.0f}", f"<title>{escape(printable(self.title))}</title>"
        box = f'viewBox="-8 -8 {self.width + 16:.0f} {self.height + 16:.0f}" style="max-width:{width}px"'
        return "\n".join([f'<svg class="picture" role="img" {box}>{title}', *self._shapes, "</svg>"])

    def file(self, command: str) -> str:
        """An SVG file, which holds the style and names the command that drew it."""
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"'
        size = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        about = f"<metadata><dc:title>megalite {command}</dc:title></metadata>"
        style = f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>"
        head = f'{about}\n{style}\n<rect width="100%" height="100%" fill="#ffffff"/>'
        return f'<?xml version="1.0" encoding="utf-8"?>\n<svg {spaces} {size}>\n{head}\n{self.svg()}\n</svg>\n'


def picture_of(command: str) -> Kind:
    """The pictures that a command draws. The title of an SVG file says so."""
    mark = rb"<\?xml[\s\S]*<dc:title>megalite %s</dc:title>"
    return Kind(f"a picture of {command}", f"{command}.svg", mark % command.encode())


def picture_problems(path: Path, command: str) -> list[Problem]:
    """Why a command cannot draw to `path` (--picture), known before anything is drawn."""
    if path.suffix.lower() != ".svg":
        return [Problem(SETTING, str(path), "must end in .svg", f"{SETTING}={command}.svg")]
    return output_problems(SETTING, path, picture_of(command))


def save_picture(draw: Callable[[], Picture], path: Path, command: str) -> None:
    """Draw to a file, which appears only when it is complete."""
    try:
        write_atomically(path, draw().file(command).encode(), picture_of(command))
    except OSError as error:
        raise UserError(Problem(SETTING, str(path), f"cannot be written: {error}", "another file")) from error
