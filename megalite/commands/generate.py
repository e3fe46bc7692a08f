"""Text from a model. See docs/huggingface.md.

python -m megalite generate runs/mine --prompt "def "
python -m megalite generate exported --prompt "Once upon a time" --num-samples 3 --temperature 1 seed=7
python -m megalite generate exported --prompt "The river" --prompt "A stone" --temperature 0 --json

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model. Nothing is downloaded and
no code that comes with a model is run. The same seed gives the same text. Exit status: 0 sampled, 2 refused.
"""

import json
from argparse import Namespace
from collections.abc import Iterator

from megalite.commands.command import COUNT, MODEL, STEP, Shown, command, option
from megalite.config.arguments import number_from
from megalite.config.compose import load_part
from megalite.errors.problems import Problem, refuse

PROBABILITY = number_from(0, 1, above=True, whole=False)


@command(
    MODEL,
    option("--prompt", action="append", required=True, help="how the text begins; may be given several times"),
    option("--max-new-tokens", type=number_from(1, 2**20), metavar="N", help="default: 100, or what there is room for"),
    option("--temperature", type=number_from(0, whole=False), default=0.8, help="0: the likeliest (default: 0.8)"),
    option("--top-k", type=number_from(0), default=50, help="0: all tokens (default: %(default)s)"),
    option("--top-p", type=PROBABILITY, default=1.0, help="1: all tokens (default: %(default)s)"),
    option("--num-samples", **COUNT, default=1, help="of each prompt (default: %(default)s)"),
    option("--json", action="store_true", help="print a JSON object a line: prompt and text"),
    STEP,
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    hint = "--prompt 'Once upon a time'"
    refuse([Problem("--prompt", text, "there is nothing to continue", hint) for text in options.prompt if not text])
    config = load_part(overrides, "generating text", ("seed", "device", "precision"))
    from megalite.hf.generate import Sampling, generate
    from megalite.hf.saved_model import open_model
    from megalite.launch.device import choose_device
    from megalite.launch.environment import ProcessEnvironment

    device = choose_device(config.device, ProcessEnvironment())
    names = ("temperature", "top_k", "top_p", "num_samples", "max_new_tokens")
    sampling = Sampling(**{name: getattr(options, name) for name in names})
    texts = generate(open_model(options.model, options.step), options.prompt, config, device, sampling)
    return Shown(lines(texts, len(options.prompt) * options.num_samples, as_json=options.json))


def lines(texts: Iterator[tuple[str, str]], count: int, *, as_json: bool) -> Iterator[str]:
    """What is printed of each text."""
    for at, (prompt, text) in enumerate(texts, 1):
        if as_json:
            yield json.dumps({"prompt": prompt, "text": text})
        else:
            yield from ([f"--- {at} of {count} ---"] if count > 1 else [])
            yield text
