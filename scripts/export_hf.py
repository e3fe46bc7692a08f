"""A run as a folder that transformers loads: weights, tokenizer, model card. See docs/huggingface.md.

python scripts/export_hf.py runs/mine exported
python scripts/export_hf.py runs/mine exported --step 1000 --dtype bf16 --max-shard-size 2GB

The newest checkpoint is exported unless --step says otherwise. OUT must be new or empty; it is there whole or not at
all. Nothing is downloaded. Exit status: 0 written, 2 refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.problems import REFUSED, UserError


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, new or empty")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="default: what the run trained in")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    from megalite.hf.export_model import bytes_of
    from megalite.train.export import export_checkpoint

    try:
        run = export_checkpoint(
            options.run_dir,
            options.out,
            lambda warning: print(f"megalite: {warning}", file=sys.stderr),
            step=options.step,
            precision=options.dtype,
            max_file_bytes=bytes_of(options.max_shard_size),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {run.config.model.name} after step {run.step}, {size / 1e6:,.1f} MB")
    if run.tokenizer_folder is None:
        print("without a tokenizer: the run does not know the one that made its tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
