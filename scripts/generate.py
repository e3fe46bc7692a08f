"""Text from a model, sampled through transformers. See docs/huggingface.md.

python scripts/generate.py runs/mine --prompt "def "
python scripts/generate.py exported --prompt "Once upon a time" --num-samples 3 --temperature 1 --seed 7

MODEL is a run folder (its newest checkpoint, or --step) or a folder of a transformers model. Nothing is downloaded and
no code that comes with a model is run. Exit status: 0 sampled, 2 refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.problems import REFUSED, UserError


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a run folder, or a folder of a transformers model")
    parser.add_argument("--prompt", required=True, help="how the text begins")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 100, or what there is room for")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=50, help="0: all tokens (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: all tokens (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same text (default: %(default)s)")
    parser.add_argument("--num-samples", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--step", type=int, help="of a run's checkpoint (default: the newest)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    from megalite.parallel.device import choose_device
    from megalite.parallel.environment import ProcessEnvironment
    from megalite.train.generate import Sampling, generate

    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        num_samples=options.num_samples,
    )
    try:
        texts = generate(
            options.model,
            options.prompt,
            sampling,
            choose_device(options.device, ProcessEnvironment()),
            lambda warning: print(f"megalite: {warning}", file=sys.stderr),
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
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
