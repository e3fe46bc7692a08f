"""`megalite COMMAND ...`: finds the command's module and gives it the other words. No other command is imported."""

import importlib
import re
import sys
from dataclasses import dataclass

from megalite import __version__
from megalite.errors.problems import REFUSED, Problem, UserError


@dataclass(frozen=True)
class Command:
    """Where a command's `main` is, and what it does."""

    module: str
    does: str
    function: str = "main"


COMMANDS = {
    "train": Command("train", "train a GPT; `torchrun ... -m megalite train ...` for several ranks", "main_to_the_end"),
    "prepare": Command("prepare", "text to token files; check token files"),
    "evaluate": Command("evaluate", "loss, perplexity and bits per byte of a model"),
    "generate": Command("generate", "text from a model"),
    "export": Command("export", "a run as a folder that transformers loads"),
    "report": Command("report", "draw the report of a run, or compare several"),
    "verify": Command("verify", "whether a layout trains like one process"),
    "plan ranks": Command("ranks", "who talks to whom in a layout"),
    "plan schedule": Command("schedule", "who computes which microbatch when in a pipeline"),
    "plan buffers": Command("buffers", "which gradient bucket holds what, and who owns it"),
}
HELP = "usage: megalite COMMAND ...\n\n{}\n\nmegalite COMMAND --help tells more."


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"megalite {__version__}")
        return 0
    group = "plan " if words[:1] == ["plan"] else ""
    if words[1 if group else 0 :][:1] in ([], ["-h"], ["--help"]):
        listed = (f"  {name:<14} {it.does}" for name, it in COMMANDS.items() if name.startswith(group))
        print(HELP.format("\n".join(listed)))
        return 0
    name = next((" ".join(words[:count]) for count in (1, 2) if " ".join(words[:count]) in COMMANDS), None)
    if name is None:
        from megalite.errors.remedies import nearest

        given = " ".join(words[: 2 if group else 1])
        near = nearest(given, COMMANDS, cutoff=0.75)
        remedy = f"did you mean megalite {near}?" if near else ", ".join(COMMANDS)
        print(UserError(Problem("command", given, "there is no such command", remedy)), file=sys.stderr)
        return REFUSED
    rest = words[len(name.split()) :]
    # What starts a training again is written to its run, in a form that torchrun takes as well.
    sys.argv = [*(["-m", "megalite", "train"] if name == "train" else [f"megalite {name}"]), *rest]
    command = COMMANDS[name]
    module = importlib.import_module(f"megalite.commands.{command.module}")
    # Its examples start the scripts of a checkout, which a wheel does not have.
    module.__doc__ = re.sub(r"python scripts/\w+\.py", f"megalite {name}", module.__doc__ or "")
    status: int = getattr(module, command.function)(rest)
    return status
