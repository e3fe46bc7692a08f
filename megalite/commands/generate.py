"""Text from a model, sampled through transformers. See docs/huggingface.md.

python scripts/generate.py runs/mine --prompt "def "
python scripts/generate.py exported --prompt "Once upon a time" --num-samples 3 --temperature 1 seed=7

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model. Nothing is downloaded and
no code that comes with a model is run. The same seed gives the same text. Exit status: 0 sampled, 2 refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.config.part import load_part
from megalite.errors.problems import REFUSED, UserError, printable, to_stderr


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL --prompt TEXT [options] [seed=N] [device=NAME]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
    parser.add_argument("--prompt", required=True, help="how the text begins")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 100, or what there is room for")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="0: all tokens (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: all tokens (default: %(default)s)")
    parser.add_argument("--num-samples", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--step", type=int, help="of a run's checkpoint (default: the newest)")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    from megalite.hf.generate import Sampling, generate
    from megalite.launch.device import choose_device
    from megalite.launch.environment import ProcessEnvironment

    try:
        config = load_part(overrides, "generating text", ("seed", "device"))
        sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=config.seed,
            num_samples=options.num_samples,
        )
        texts = generate(
            options.model,
            options.prompt,
            sampling,
            choose_device(config.device, ProcessEnvironment()),
            lambda warning: to_stderr(f"megalite: {warning}"),
            options.step,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number} of {len(texts)} ---")
        print(printable(text) if sys.stdout.isatty() else text)
    return 0
