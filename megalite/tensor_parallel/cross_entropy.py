"""Cross entropy where each rank has the logits of some columns of the vocabulary.

Invariant: the loss of a token is the same number, bit for bit, on every rank, and depends on the vocabulary alone: not
on its padding, and on the number of ranks only by rounding. The statistics of a rank's columns are three or four
numbers per token in fp32 (fp64 in fp64), exchanged in one all-gather and combined by every rank in the same order. The
mean that label smoothing takes is over the whole vocabulary: over a rank's part, it would depend on their number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.pieces import statistics_dtype
from megalite.tensor_parallel.collectives import TensorGroup, start_all_gather

# Elements worked on at once in fp32. On a CPU 4 MiB, so that the passes over a piece stay in the caches (a whole chunk
# at once measured 2 to 6 times slower); on CUDA 512 MiB, which only bounds memory.
PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


@dataclass(frozen=True)
class TokenLoss:
    """logsumexp - (1 - label_smoothing) * logit[label] - label_smoothing * mean(logits) + z_loss * logsumexp^2.

    Sum, mean and label are over the `vocab_size` logits of a token, of which this rank of `group` has `real`, from
    `first` on; any more columns that it has are padding, whose logits must be -inf. (Label smoothing: Szegedy et
    al. 2016, arXiv 1512.00567. z-loss: Chowdhery et al. 2022, arXiv 2204.02311.)
    """

    group: TensorGroup | None
    first: int
    real: int
    vocab_size: int
    label_smoothing: float
    z_loss: float

    @classmethod
    def of(
        cls,
        columns: int,
        padded_vocab: int,
        group: TensorGroup | None,
        *,
        vocab_size: int,
        label_smoothing: float,
        z_loss: float,
    ) -> "TokenLoss":
        """For the rank that has these many columns of a vocabulary padded to `padded_vocab`."""
        index, size = (0, 1) if group is None else (group.index, group.size)
        first, stop = index * padded_vocab // size, (index + 1) * padded_vocab // size
        assert columns == stop - first, (columns, first, stop, padded_vocab)
        assert 0 < vocab_size <= padded_vocab, (vocab_size, padded_vocab)
        assert 0 <= label_smoothing < 1, label_smoothing
        return cls(group, first, max(0, min(stop, vocab_size) - first), vocab_size, label_smoothing, z_loss)

    def local_statistics(self, logits: Tensor, probabilities: Tensor, labels: Tensor) -> Tensor:
        """[3 or 4, r] from `softmax`'s [r, columns] and labels [r]: maximum, sum of exp(logit - maximum), the label's
        logit (zero where another rank has it) and, for smoothing, the sum of logits."""
        if not self.real:
            shape = (4 if self.label_smoothing else 3, *labels.shape)
            statistics = torch.zeros(shape, dtype=probabilities.dtype, device=labels.device)
            statistics[0] = -torch.inf
            return statistics
        sums = probabilities.amax(-1).reciprocal_()  # the largest cannot underflow, as the label's own can
        logit_sums = logits[:, : self.real].sum(-1, dtype=sums.dtype) if self.label_smoothing else None
        return self._stacked(logits, logits.amax(-1), sums, logit_sums, labels)

    def statistics_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`local_statistics` without a softmax, for a compiler: one kernel that reads the logits, in `statistics_dtype`
        or cast to it on the way, and writes nothing as large. There is a `real` column."""
        maxima = logits.amax(-1, keepdim=True)  # the form in which inductor takes maximum and sum in one pass
        sums = (logits - maxima).exp().sum(-1, keepdim=True)
        logit_sums = None
        if self.label_smoothing:  # over as many columns as the other sums, to be taken with them
            is_real = torch.arange(logits.shape[1], device=logits.device) < self.real
            logit_sums = torch.where(is_real, logits, 0.0).sum(-1)
        return self._stacked(logits, maxima[:, 0], sums[:, 0], logit_sums, labels)

    def _stacked(
        self, logits: Tensor, maxima: Tensor, sums: Tensor, logit_sums: Tensor | None, labels: Tensor
    ) -> Tensor:
        column, is_here = self._column(labels)
        label_logits = logits.gather(1, column[:, None])[:, 0]
        rows = [maxima, sums, label_logits if is_here is None else torch.where(is_here, label_logits, 0.0)]
        rows += [] if logit_sums is None else [logit_sums]
        return torch.stack([row.to(sums.dtype) for row in rows])

    def start_exchange(self, statistics: Tensor) -> Tensor:
        """Of [k, r] of every rank, [t, k, r], complete after `finish` on the result where there is a group."""
        if self.group is None:
            return statistics[None]
        return start_all_gather(statistics, self.group).view(self.group.size, *statistics.shape)

    def combine(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """From [t, k, r]: losses [r], and what to multiply `softmax`'s local probabilities by for the gradient, [r].

        Differences to the largest logit are summed, so that large logits cancel before they round anything.
        """
        maxima, sums, label_logits, *logit_sums = statistics.unbind(1)
        top = maxima.amax(0)
        sums = sums * (maxima - top).exp_()  # [t, r]
        total = sums.sum(0)
        log_total = total.log()
        losses = log_total + (1 - self.label_smoothing) * (top - label_logits.sum(0))
        if self.label_smoothing:
            losses += self.label_smoothing * (top - logit_sums[0].sum(0) / self.vocab_size)
        factor = sums[0 if self.group is None else self.group.index] / total
        if self.z_loss:
            log_sum = top + log_total
            losses += self.z_loss * log_sum.square()
            factor *= 1 + 2 * self.z_loss * log_sum
        return losses, factor

    def write_gradient(
        self, out: Tensor, probabilities: Tensor, labels: Tensor, factor: Tensor, upstream: Tensor
    ) -> None:
        """The gradient of sum(upstream [r] * losses [r]) to out [r, columns]; `probabilities` are used up.

        d loss / d logit = probability * (1 + 2 z logsumexp) - (1 - s) [is label] - s / vocab_size, 0 for padding.
        """
        if not self.real:
            out.zero_()
            return
        column, is_here = self._column(labels)
        probabilities.mul_((factor * upstream)[:, None])
        label_term = (self.label_smoothing - 1) * upstream
        if is_here is not None:
            label_term *= is_here
        probabilities.scatter_add_(1, column[:, None], label_term[:, None])
        if self.label_smoothing:
            probabilities[:, : self.real].sub_((self.label_smoothing / self.vocab_size * upstream)[:, None])
        out.copy_(probabilities)

    def turn_into_gradient(
        self, logits: Tensor, statistics: Tensor, labels: Tensor, factor: Tensor, upstream: Tensor
    ) -> None:
        """What `write_gradient` writes, in place of the logits [r, columns] of which `statistics_of` are [k, r]; for a
        compiler: one kernel, which no scatter can be part of."""
        columns = torch.arange(logits.shape[1], device=logits.device)
        column, is_here = self._column(labels)
        has_label = columns == column[:, None]
        if is_here is not None:
            has_label &= is_here[:, None]
        maxima, sums = statistics[:2, :, None]
        gradient = (logits.to(sums.dtype) - maxima).exp() * (factor * upstream / sums[:, 0])[:, None]
        gradient -= torch.where(has_label, (1 - self.label_smoothing) * upstream[:, None], 0.0)
        if self.label_smoothing:
            share = self.label_smoothing / self.vocab_size * upstream
            gradient -= torch.where(columns < self.real, share[:, None], 0.0)
        logits.copy_(gradient)

    def _column(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The local column of each label, and whether it is here (None: all are); elsewhere the column is any."""
        if self.group is None:
            return labels, None
        column = labels - self.first
        inside = column.clamp(0, self.real - 1)
        return inside, inside == column


def softmax(logits: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [r, columns], in the dtype of `work` or as given, and their probabilities in the dtype of `work`.

    On a CPU `work` is of `work_buffers`, and what is returned lies in it until the next call.
    """
    if logits.is_cuda:
        return logits, torch.softmax(logits, -1, dtype=work.dtype)
    r = logits.shape[0]
    if logits.dtype != work.dtype:
        logits = work[0, :r].copy_(logits)
    return logits, torch.softmax(logits, -1, out=work[1, :r])


def work_buffers(logits: Tensor) -> tuple[Tensor, int]:
    """Buffers [2, r, columns] for `softmax` of r rows of logits [n, columns], and r: how many to take at once.

    Fresh pages cost a CPU more than the arithmetic; CUDA's allocator makes the buffers needless (r rows of none).
    """
    n, columns = logits.shape
    rows = max(1, min(n, PIECE_ELEMENTS[logits.device.type] // max(1, columns)))
    dtype = statistics_dtype(logits.dtype)
    return torch.empty(2, 0 if logits.is_cuda else rows, columns, dtype=dtype, device=logits.device), rows
