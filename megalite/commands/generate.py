"""Text from a model, sampled through transformers. See docs/huggingface.md.

python scripts/generate.py runs/mine --prompt "def "
python scripts/generate.py exported --prompt "Once upon a time" --num-samples 3 --temperature 1 seed=7

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model. Nothing is downloaded and
no code that comes with a model is run. The same seed gives the same text. Exit status: 0 sampled, 2 refused.
"""

import sys
from argparse import Namespace

from megalite.commands.command import MODEL, STEP, Shown, command, option, warn
from megalite.config.compose import load_part
from megalite.errors.problems import printable


@command(
    MODEL,
    option("--prompt", required=True, help="how the text begins"),
    option("--max-new-tokens", type=int, metavar="N", help="default: 100, or what there is room for"),
    option("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)"),
    option("--top-k", type=int, default=50, help="0: all tokens (default: %(default)s)"),
    option("--top-p", type=float, default=1.0, help="1: all tokens (default: %(default)s)"),
    option("--num-samples", type=int, default=1, help="default: %(default)s"),
    STEP,
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    from megalite.hf.generate import generate
    from megalite.launch.device import choose_device
    from megalite.launch.environment import ProcessEnvironment

    config = load_part(overrides, "generating text", ("seed", "device"))
    device = choose_device(config.device, ProcessEnvironment())
    chosen = {name: value for name, value in vars(options).items() if name not in ("model", "prompt")}
    texts = generate(options.model, options.prompt, device, warn, seed=config.seed, **chosen)
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)} ---")
        print(printable(text) if sys.stdout.isatty() else text)
    return Shown()
