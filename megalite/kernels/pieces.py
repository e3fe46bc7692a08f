"""How much a CPU works on at once.

A chain of elementwise steps in fp32 runs two to three times faster over pieces whose copies stay in the caches, best in
buffers that serve for every piece: fresh pages and main memory cost more than the arithmetic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ELEMENTS = 1 << 16  # per thread: 256 KiB in fp32, so that three or four buffers of a piece fit in 1 to 2 MiB


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, all of the same length, cut along their first dim into pieces of the first one's piece length."""
    return zip(*(tensor.split(_piece_length(tensors[0])) for tensor in tensors), strict=True)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, norms, losses and tables for activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def piece_buffers(count: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`count` buffers of the size of the longest piece of x, in one tensor [count, piece length, ...]."""
    return x.new_empty(count, min(len(x), _piece_length(x)), *x.shape[1:], dtype=dtype)


def _piece_length(x: Tensor) -> int:
    return max(1, ELEMENTS * torch.get_num_threads() // max(1, x.shape[1:].numel()))
