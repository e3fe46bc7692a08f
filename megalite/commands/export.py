"""A run as a folder that transformers loads: weights, tokenizer, model card. See docs/huggingface.md.

python scripts/export_hf.py runs/mine exported
python scripts/export_hf.py runs/mine exported precision=bf16 --step 1000 --max-shard-size 2GB

The newest checkpoint is exported unless --step says otherwise, in the precision that the run trained in unless
precision=NAME does. OUT must be new or empty; it is there whole or not at all.
Nothing is downloaded. Exit status: 0 written, 2 refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.config.part import load_part
from megalite.errors.problems import REFUSED, UserError, to_stderr


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        usage="%(prog)s RUN_DIR OUT [options] [precision=NAME]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, new or empty")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    from megalite.hf.export import export_checkpoint
    from megalite.hf.export_model import bytes_of

    try:
        precision = load_part(overrides, "exporting", ("precision",)).precision
        run = export_checkpoint(
            options.run_dir,
            options.out,
            lambda warning: to_stderr(f"megalite: {warning}"),
            step=options.step,
            precision=None if precision == "auto" else precision,
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
