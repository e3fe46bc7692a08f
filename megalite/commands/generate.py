"""Text from a model. See docs/huggingface.md.

python -m megalite generate runs/mine --prompt "def "
python -m megalite generate exported --prompt "Once upon a time" --num-samples 3 --temperature 1 seed=7
python -m megalite generate exported --prompts prompts.txt --temperature 0 --json

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model. Nothing is downloaded and
no code that comes with a model is run. The same seed gives the same text. Exit status: 0 sampled, 2 refused.
"""

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megalite.commands.command import COUNT, MODEL, STEP, Progress, Shown, command, option, warn
from megalite.config.arguments import number_from
from megalite.config.compose import load_part
from megalite.config.user_files import read_text
from megalite.errors.problems import NO_VALUE, Problem, refuse

PROBABILITY = number_from(0, 1, above=True, whole=False)


@command(
    MODEL,
    option("--prompt", action="append", default=[], help="how the text begins; may be given several times"),
    option("--prompts", type=Path, metavar="FILE", help="a prompt on each line of UTF-8 text; blank lines are none"),
    option("--max-new-tokens", type=number_from(1, 2**20), metavar="N", help="default: 100, or what there is room for"),
    option("--temperature", type=number_from(0, whole=False), default=0.8, help="0: the likeliest (default: 0.8)"),
    option("--top-k", type=number_from(0), default=50, help="0: all tokens (default: %(default)s)"),
    option("--top-p", type=PROBABILITY, default=1.0, help="1: all tokens (default: %(default)s)"),
    option("--num-samples", **COUNT, default=1, help="of each prompt (default: %(default)s)"),
    option("--json", action="store_true", help="print a JSON object a line: prompt and text"),
    STEP,
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    prompts = asked(options)
    config = load_part(overrides, "generating text", ("seed", "device", "precision"))
    from megalite.hf.generate import Drawing, generate
    from megalite.hf.saved_model import open_model
    from megalite.launch.device import choose_device
    from megalite.launch.environment import ProcessEnvironment

    device = choose_device(config.device, ProcessEnvironment())
    drawing, count = Drawing(options.temperature, options.top_k, options.top_p), options.num_samples
    saved = open_model(options.model, warn, options.step)
    room = options.max_new_tokens
    texts = generate(saved, prompts, config, device, drawing, warn, Progress(), max_new_tokens=room, num_samples=count)
    return Shown(lines(texts, len(prompts) * count, as_json=options.json))


def asked(options: Namespace) -> list[str]:
    """The prompts of the command and of its file."""
    in_file = re.split("\r?\n", read_text(options.prompts, "name a file of UTF-8 text")) if options.prompts else []
    prompts = [*options.prompt, *filter(str.strip, in_file)]
    hint = "--prompt 'Once upon a time', or --prompts FILE of UTF-8 text"
    refuse([] if prompts else [Problem("--prompt", NO_VALUE, "there is nothing to continue", hint)])
    rule = "there is nothing to continue, or it is not UTF-8 text"
    refuse([Problem("--prompt", text, rule, hint) for text in prompts if not _is_utf8(text)])
    return prompts


def _is_utf8(text: str) -> bool:
    with suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


def lines(texts: Iterator[tuple[str, str]], count: int, *, as_json: bool) -> Iterator[str]:
    """What is printed of each text."""
    for at, (prompt, text) in enumerate(texts, 1):
        if as_json:
            yield json.dumps({"prompt": prompt, "text": text})
        else:
            yield from ([f"--- {at} of {count} ---"] if count > 1 else [])
            yield text
