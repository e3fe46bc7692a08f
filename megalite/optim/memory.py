"""The memory that training keeps from step to step, per parameter and exactly for a layout: plain arithmetic, no torch.

Parameters and gradients are whole on every rank of a model; of masters and of the optimizer's state each of the ranks
that share it has its part. Where parameters have the masters' dtype they are the masters. Activations and what travels
come on top. With AdamW the sums are those of Megatron-LM's distributed optimizer: 6 + 12/d bytes in bf16, 8 + 8/d in
fp32. In fp16 Megatron-LM sums gradients in fp16 and widens a rank's part (4 + 16/d); we sum them in fp32 (6 + 12/d).
"""

from typing import NamedTuple

from megalite.config.schema import OPTIMIZERS, OptimizerConfig
from megalite.layout.buffer_layout import BufferLayout

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class StateBytes(NamedTuple):
    """Bytes of what training keeps: of one element of each kind, or of all that one rank holds."""

    parameters: int
    gradients: int
    masters: int  # 0 where the parameters are the masters
    optimizer: int  # its state beside the masters

    @property
    def total(self) -> int:
        return sum(self)


def bytes_of_element(
    precision: str, optimizer: OptimizerConfig, *, matrix: bool = True, master_precision: bool = False
) -> StateBytes:
    """Bytes of one element of a matrix, or of another parameter. In fp64 everything that is fp32 elsewhere is fp64.

    `master_precision` is for parameters that have the masters' dtype in every precision (`ParameterRecord.precision`).
    """
    wide = "fp64" if precision == "fp64" else "fp32"
    stored = wide if master_precision else precision
    kept = OPTIMIZERS[optimizer.name][0 if matrix else 1]
    named = [optimizer.moment_dtype if dtype == "moment_dtype" else dtype for dtype in kept]
    gradients, *state = (BYTES[wide if dtype == "fp32" else dtype] for dtype in (optimizer.gradient_dtype, *named))
    return StateBytes(BYTES[stored], gradients, 0 if stored == wide else BYTES[wide], sum(state))


def bytes_of_rank(layout: BufferLayout, precision: str, optimizer: OptimizerConfig) -> StateBytes:
    """The bytes that one rank keeps, padding included; the same for all ranks that exchange the layout's buckets."""
    kept = StateBytes(0, 0, 0, 0)
    for bucket in layout.buckets:
        wide = bucket.buffer.precision == "master"
        element = bytes_of_element(precision, optimizer, matrix=bucket.buffer.whole, master_precision=wide)
        counts = [bucket.size] * 2 + [bucket.slice_size] * 2
        kept = StateBytes(*(sum_ + count * size for sum_, count, size in zip(kept, counts, element, strict=True)))
    return kept
