"""What megatron-core itself writes and reads; run as a program: importing megatron-core changes things in torch.

python -m tests.data.megatron.oracle THEIRS [OURS]   writes all CASES into THEIRS, prints what it reads in OURS as JSON
python -m tests.data.megatron.oracle --fixtures      writes the two cases that are kept beside this file
"""

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A token file: documents of sequences of ids, and the mode of each sequence in a multimodal file."""

    dtype: str
    documents: list[list[list[int]]]
    modes: list[int] | None = None

    @property
    def sequences(self) -> list[list[int]]:
        return [sequence for document in self.documents for sequence in document]

    @property
    def tokens(self) -> list[int]:
        return [token for sequence in self.sequences for token in sequence]

    @property
    def boundaries(self) -> list[int]:
        """The first sequence of each document, and how many there are."""
        return np.cumsum([0, *(len(document) for document in self.documents)]).tolist()


LARGEST = {name: int(np.iinfo(name).max) for name in ("uint8", "int8", "int16", "uint16", "int32", "int64")}
IDS = tuple(LARGEST)
SEVERAL = [[[7, 8, 9], [10]], [[11, 12]], [[13], [], [14, 15, 16]], [[70_000]]]
CASES = {
    **{name: Case(name, [[[1, 2, 3]], [[4, largest]], [[5]]]) for name, largest in LARGEST.items()},
    "several": Case("int32", SEVERAL),
    "modes": Case("uint16", [[[1, 2], [3, 4, 5]], [[6]]], modes=[0, 1, 0]),
}
FIXTURES = ("several", "modes")


def megatron() -> Any:
    """megatron-core's module of token files, without what else the package imports (seconds of models, optimizers)."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    core = ModuleType("megatron.core")
    core.__path__ = [str(Path(folder, "core")) for folder in spec.submodule_search_locations]
    sys.modules.setdefault("megatron.core", core)
    importlib.import_module("megatron.core.parallel_state")  # first: it and megatron.core.utils import each other
    return importlib.import_module("megatron.core.datasets.indexed_dataset")


def write(case: Case, prefix: Path) -> None:
    """The case as megatron-core writes it."""
    import torch

    dtype = getattr(np, case.dtype)
    builder = megatron().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=case.modes is not None)
    modes = iter(case.modes or [0] * len(case.sequences))
    for document in case.documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), next(modes))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def read(prefix: Path) -> dict[str, object]:
    """What megatron-core finds in a token file."""
    found = megatron().IndexedDataset(str(prefix))
    sequences = [found[number].tolist() for number in range(len(found))]
    return {
        "dtype": found.index.dtype.__name__,
        "sequences": sequences,
        "boundaries": found.document_indices.tolist(),
    }


def main(arguments: list[str]) -> None:
    if arguments == ["--fixtures"]:
        for name in FIXTURES:
            write(CASES[name], HERE / name)
        return
    theirs, *ours = map(Path, arguments)
    for name, case in CASES.items():
        write(case, theirs / name)
    prefixes = [path.with_suffix("") for folder in ours for path in sorted(folder.glob("*.idx"))]
    print(json.dumps({prefix.name: read(prefix) for prefix in prefixes}))


if __name__ == "__main__":
    main(sys.argv[1:])
