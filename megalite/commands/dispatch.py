"""`megalite COMMAND ...`: finds the command's function and gives it the other words. No other command is imported."""

import sys
from importlib import import_module

from megalite import __version__
from megalite.errors.problems import REFUSED, Problem, UserError, to_stderr

COMMANDS = {  # name: its module, its function there, and what it does
    "train": ("train", "main_to_the_end", "train a GPT; `torchrun ... -m megalite train ...` for several ranks"),
    "prepare": ("models", "prepare", "text to token files; check token files"),
    "evaluate": ("models", "evaluate", "loss, perplexity and bits per byte of a model"),
    "generate": ("models", "generate", "text from a model"),
    "export": ("models", "export", "a run as a folder that transformers loads"),
    "report": ("models", "report", "draw the report of a run, or compare several"),
    "checkpoints": ("checkpoints", "checkpoints", "list, verify and prune the checkpoints of a run"),
    "verify": ("plan", "verify", "whether a layout trains like one process"),
    "coordinates": ("coordinates", "coordinates", "whether activations keep their size as a model grows"),
    "scaling plan": ("scaling", "plan", "a sweep of sizes, from which to learn how the loss scales"),
    "scaling fit": ("scaling", "fit", "how the loss of finished runs falls with parameters, tokens and compute"),
    "preflight": ("preflight", "main", "measure the nodes of a job, and name those that are slow or wrong"),
    "plan ranks": ("plan", "ranks", "who talks to whom in a layout"),
    "plan schedule": ("plan", "schedule", "who computes which microbatch when in a pipeline"),
    "plan buffers": ("plan", "buffers", "which gradient bucket holds what, and who owns it"),
}


def main() -> int:
    """The exit status of the command that sys.argv names."""
    words = sys.argv[1:]
    if words[:1] == ["--version"]:
        print(f"megalite {__version__}")
        return 0
    size = 2 if words[:1] in (["plan"], ["scaling"]) else 1
    name, rest = " ".join(words[:size]), words[size:]
    if f"plan {name}" in COMMANDS:  # `megalite schedule` is `megalite plan schedule`
        name = f"plan {name}"
    if name in ("", "plan", "scaling") or name.endswith(("-h", "--help")):
        listed = "\n".join(f"  {name:<14} {does}" for name, (*_, does) in COMMANDS.items())
        print(f"usage: megalite COMMAND ...\n\n{listed}\n\nmegalite COMMAND --help says more.")
        return 0
    if name not in COMMANDS:
        to_stderr(str(UserError(Problem("command", name, "there is no such command", ", ".join(COMMANDS)))))
        return REFUSED
    # What starts a training again is written to its run, in a form that torchrun takes as well.
    sys.argv = [*(["-m", "megalite", "train"] if name == "train" else [f"megalite {name}"]), *rest]
    module, function, _ = COMMANDS[name]
    status: int = getattr(import_module(f"megalite.commands.{module}"), function)(rest)
    return status
