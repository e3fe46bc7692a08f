"""kernels/expert_rows.py in plain torch, for CPUs; like it, it asks nothing of the device."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor


def sum_rows(rows: Tensor, order: Tensor, starts: Tensor, used: Tensor) -> Tensor:
    token = torch.searchsorted(starts, torch.arange(len(order), device=order.device), right=True) - 1
    terms = torch.where((order < used).unsqueeze(1), rows[order], 0.0).double()
    sums = terms.new_zeros(len(starts), rows.shape[1])
    return sums.index_add_(0, token, terms).to(rows.dtype)


def add_transposed_products(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    group = torch.searchsorted(ends, torch.arange(len(left), device=left.device), right=True)
    of_group = group.unsqueeze(1) == torch.arange(len(ends), device=left.device)  # [m, g]
    there = (group < len(ends)).unsqueeze(1)
    left, right = (torch.where(there, part.double(), 0.0) for part in (left, right))
    total += torch.einsum("mg,mv,mh->gvh", of_group.double(), left, right)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this file in place of the one that needs triton."""
    this: Any = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "megalite.kernels.expert_rows", this)
