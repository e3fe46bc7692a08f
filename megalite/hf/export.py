"""A checkpoint of a run as a folder that transformers loads, with tokenizer and model card.

Exported are the masters, rounded to the precision that the run trains in: to the bit the parameters that it computes
with. One process reads them by logical name, a few at a time, so the layout that wrote them does not matter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megalite.errors.problems import collect
from megalite.hf.export_model import MAX_FILE_BYTES, export_model, family_of, require_new
from megalite.hf.model_card import model_card
from megalite.hf.saved_run import SavedRun, open_run
from megalite.hf.tokenizer_files import tokenizer_files
from megalite.launch.device import DTYPES
from megalite.train.history import read_metrics
from megalite.train.state import SavedState


def export_checkpoint(
    run_dir: Path,
    folder: Path,
    report: Callable[[str], None],
    *,
    step: int | None = None,
    precision: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> SavedRun:
    """Write `folder` from the newest undamaged checkpoint of the run, or that of `step`; see `export_model`.

    Returns what was exported. `precision` (fp32, bf16, ...) is the run's own unless given. `report` is told of damaged
    checkpoints that were passed over, as in `newest`.
    """
    require_new(folder)  # before gigabytes are verified
    run = open_run(run_dir, report, step)
    export_run(run, folder, precision=precision, max_file_bytes=max_file_bytes)
    return run


def export_run(
    run: SavedRun, folder: Path, *, precision: str | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write `folder` from an opened checkpoint; see `export_checkpoint`."""
    config, tokenizer = run.config, run.tokenizer()
    family, seq_length = family_of(config.model), config.train.seq_length
    others = {} if tokenizer is None else tokenizer_files(tokenizer, seq_length)
    others["README.md"] = _card(run, family, has_tokenizer=tokenizer is not None).encode()
    export_model(
        run.masters(),
        config.model,
        folder,
        dtype=DTYPES[precision or config.precision],
        context_length=seq_length,
        end_of_document=None if tokenizer is None else tokenizer.end_of_document,
        max_file_bytes=max_file_bytes,
        others=others,
    )


def _card(run: SavedRun, family: str, *, has_tokenizer: bool) -> str:
    state = SavedState.of(run.found)
    return model_card(
        run.config,
        family,
        step=run.step,
        tokens=state.progress.tokens,
        data=state.data.description,
        figures=_figures(run.path / "metrics.jsonl", run.step),
        has_tokenizer=has_tokenizer,
    )


def _figures(path: Path, step: int) -> dict[str, Any]:
    """The newest figures of every kind that the run had at `step`; none where its metrics are not there to be read."""
    records = collect(lambda: read_metrics(path), []) or []
    figures: dict[str, Any] = {}
    for record in records:
        if record["step"] <= step:
            figures |= record
    return figures
