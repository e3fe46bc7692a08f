"""A run as a folder that transformers loads: weights, tokenizer, model card. See docs/huggingface.md.

python -m megalite export runs/mine exported
python -m megalite export runs/mine exported precision=bf16 --step 1000 --max-shard-size 2GB

The newest checkpoint is exported unless --step says otherwise, in the precision that the run trained in unless
precision=NAME does. OUT must be new or empty; it is there whole or not at all.
Nothing is downloaded. Exit status: 0 written, 2 refused.
"""

from argparse import Namespace
from pathlib import Path

from megalite.commands.command import STEP, Shown, command, option
from megalite.config.compose import load_part


@command(
    option("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder"),
    option("out", type=Path, metavar="OUT", help="the folder to write, new or empty"),
    STEP,
    option("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: %(default)s)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    from megalite.hf.export import export_checkpoint, require_new
    from megalite.hf.saved_model import open_model

    precision = load_part(overrides, "exporting", ("precision",)).precision
    require_new(options.out)  # before gigabytes are verified
    model = open_model(options.run_dir, options.step)
    step = export_checkpoint(model, options.out, precision=precision, max_shard_size=options.max_shard_size)
    without = "" if model.tokenizer else ", without a tokenizer: the run does not know the one that made its tokens"
    return Shown([f"{options.out}: {model.config.name} after step {step}{without}"])
