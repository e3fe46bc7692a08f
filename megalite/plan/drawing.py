"""Makes the page that every picture is drawn on, and saves it: a title, lines below it, axes and a legend.

Equal pictures give equal files (no time stamps, no settings of the user). Lengths are inches. matplotlib is imported
when a picture is asked for, without pyplot: nothing global changes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.config.durable_files import draft_of, put_in_place
from megalite.config.own_files import output_problems, picture_of
from megalite.config.packages import is_installed
from megalite.errors.problems import Problem, UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ["#3573b9", "#e67e22", "#2e9e5b", "#d64545", "#8d5fc0", "#8a6248", "#df7fb8", "#9a9a1f", "#22a9b8", "#5b6676"]
INK, GREY, FILL, EDGE = "#1d2733", "#6a7480", "#f3f4f6", "#c2c8d0"
MARGIN, DPI = 0.35, 150
SETTING = "--picture"


def picture_problems(path: Path, command: str) -> list[Problem]:
    """Why no picture of a command can be written to `path` (--picture), known before anything is drawn."""
    rules = {
        "must end in .png or .svg": (path.suffix.lower() in (".png", ".svg"), f"{SETTING}=picture.png"),
        f"the folder {path.parent} does not exist": (path.parent.is_dir(), "make it, or another"),
        "the package matplotlib is not installed": (
            is_installed("matplotlib"),
            "pip install matplotlib, or leave the picture out",
        ),
    }
    problems = [Problem(SETTING, str(path), rule, remedy) for rule, (kept, remedy) in rules.items() if not kept]
    return problems or output_problems(SETTING, path, picture_of(command))


def save_picture(draw: Callable[[], "Figure"], path: Path, command: str) -> None:
    """Draw to a .png or .svg file, which appears only when it is complete; `command` is named in it."""
    from matplotlib import style

    draft, kind = draft_of(path), path.suffix.lower().removeprefix(".")
    plain = {"svg.hashsalt": "megalite", "svg.fonttype": "none", "hatch.linewidth": 0.6}
    try:
        with style.context(["default", plain]):
            by = f"megalite {command}"
            written = {"Creator": by, "Date": None} if kind == "svg" else {"Software": by}
            draw().savefig(draft, format=kind, dpi=DPI, metadata=written)
        put_in_place(draft, path, picture_of(command))
    except OSError as error:
        raise UserError(Problem(SETTING, str(path), f"cannot be written: {error}", "another file")) from error
    finally:
        draft.unlink(missing_ok=True)


def page(
    texts: Sequence[str], width: float, height: float, *, beside: tuple[float, float] = (0, 0), below: float = 0.6
) -> tuple["Figure", "Axes"]:
    """Axes of this size, in inches from their lower left corner, under a title and lines of text.

    `beside` and `below` are the room to the left and right of the axes, and for the legend.
    """
    from matplotlib.figure import Figure

    header = 0.45 + 0.2 * len(texts)
    widest = max(0.125 * len(texts[0]), *(0.08 * len(text) for text in texts[1:]), width + sum(beside))
    whole = widest + 2 * MARGIN, height + header + below + 2 * MARGIN
    figure = Figure(figsize=whole)
    figure.text(MARGIN / whole[0], 1 - MARGIN / whole[1], texts[0], va="top", size=13, weight="bold", color=INK)
    for number, text in enumerate(texts[1:]):
        y = 1 - (MARGIN + 0.28 + 0.2 * number) / whole[1]
        figure.text(MARGIN / whole[0], y, text, va="top", size=9.5, color=GREY)
    place = ((MARGIN + beside[0]) / whole[0], (MARGIN + below) / whole[1], width / whole[0], height / whole[1])
    axes = figure.add_axes(place, xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def legend(figure: "Figure", handles: Sequence[Any], note: str = "", **options: Any) -> None:
    """What the colours and lines mean, side by side at the bottom of the page, and a line of text below."""
    left, high = (MARGIN / size for size in figure.get_size_inches())
    if handles:
        options |= {"loc": "lower left", "bbox_to_anchor": (left, 1.3 * high), "borderaxespad": 0, "borderpad": 0}
        options |= {"frameon": False, "fontsize": 9, "labelcolor": INK, "columnspacing": 1.4}
        figure.legend(handles=handles, ncols=len(handles), **options)
    figure.text(left, 0.9 * high, note, va="center", size=8.5, color=GREY)


def mixed(colour: str, other: str, share: float) -> str:
    """The colour with a `share` of another in it."""
    from matplotlib.colors import to_hex, to_rgb

    r, g, b = (own + (theirs - own) * share for own, theirs in zip(to_rgb(colour), to_rgb(other), strict=True))
    return to_hex((r, g, b))


def fitting(width: float, size: float, *texts: str) -> str:
    """The first of the texts, of this size in points, that is narrower than `width`; empty if none is."""
    return next((text for text in texts if len(text) * size * 0.0093 + 0.04 < width), "")
