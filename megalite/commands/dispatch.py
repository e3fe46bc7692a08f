"""`megalite COMMAND ...`: finds the command's module and gives it the other words. No other command is imported."""

import importlib
import sys

from megalite import __version__
from megalite.errors.problems import REFUSED, Problem, UserError, to_stderr

COMMANDS = {  # name: the module whose `main` it is, and what it does
    "train": ("train", "train a GPT; `torchrun ... -m megalite train ...` for several ranks"),
    "prepare": ("prepare", "text to token files; check token files"),
    "evaluate": ("evaluate", "loss, perplexity and bits per byte of a model"),
    "generate": ("generate", "text from a model"),
    "export": ("export", "a run as a folder that transformers loads"),
    "report": ("report", "draw the report of a run, or compare several"),
    "verify": ("verify", "whether a layout trains like one process"),
    "preflight": ("preflight", "measure the nodes of a job, and name those that are slow or wrong"),
    "plan ranks": ("ranks", "who talks to whom in a layout"),
    "plan schedule": ("schedule", "who computes which microbatch when in a pipeline"),
    "plan sequence": ("sequence", "who holds which part of a sequence, and computes which scores when"),
    "plan buffers": ("buffers", "which gradient bucket holds what, and who owns it"),
}


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["--version"]:
        print(f"megalite {__version__}")
        return 0
    size = 2 if words[:1] == ["plan"] else 1
    name, rest = " ".join(words[:size]), words[size:]
    if f"plan {name}" in COMMANDS:  # `megalite schedule` is `megalite plan schedule`
        name = f"plan {name}"
    if name in ("", "plan") or name.endswith(("-h", "--help")):
        listed = "\n".join(f"  {name:<14} {does}" for name, (_, does) in COMMANDS.items())
        print(f"usage: megalite COMMAND ...\n\n{listed}\n\nmegalite COMMAND --help says more.")
        return 0
    if name not in COMMANDS:
        to_stderr(str(UserError(Problem("command", name, "there is no such command", ", ".join(COMMANDS)))))
        return REFUSED
    # What starts a training again is written to its run, in a form that torchrun takes as well.
    sys.argv = [*(["-m", "megalite", "train"] if name == "train" else [f"megalite {name}"]), *rest]
    module = importlib.import_module(f"megalite.commands.{COMMANDS[name][0]}")
    status: int = (module.main_to_the_end if name == "train" else module.main)(rest)
    return status
