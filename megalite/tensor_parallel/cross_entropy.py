"""Cross entropy where each rank has the logits of some columns of the vocabulary.

Invariant: the loss of a token is the same number, bit for bit, on every rank, and depends on the vocabulary alone: not
on its padding, and on the number of ranks only by rounding. The statistics of a rank's columns are three or four
numbers per token in fp32 (fp64 in fp64), exchanged in one all-gather and combined by every rank in the same order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.pieces import statistics_dtype
from megalite.tensor_parallel.collectives import TensorGroup, start_all_gather

# Elements worked on at once in fp32. On a CPU 4 MiB, so that the passes over a piece stay in the caches (a whole chunk
# at once measured 2 to 6 times slower); on CUDA 512 MiB, which only bounds memory.
PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}


@dataclass
class TokenLoss:
    """logsumexp - (1 - label_smoothing) * logit[label] - label_smoothing * mean(logits) + z_loss * logsumexp^2.

    Sum, mean and label are over the `vocab_size` logits of a token, of which this rank of `group` has `real`, from
    `first` on; any more columns that it has are padding, whose logits must be -inf. (Label smoothing: Szegedy et
    al. 2016, arXiv 1512.00567. z-loss: Chowdhery et al. 2022, arXiv 2204.02311.)
    """

    columns: int  # of this rank
    padded_vocab: int
    group: TensorGroup | None
    vocab_size: int
    label_smoothing: float
    z_loss: float

    def __post_init__(self) -> None:
        index, self.size = (0, 1) if self.group is None else (self.group.index, self.group.size)
        self.first, stop = index * self.padded_vocab // self.size, (index + 1) * self.padded_vocab // self.size
        assert self.columns == stop - self.first, (self, stop)
        self.real = max(0, min(stop, self.vocab_size) - self.first)

    def start_exchange(self, statistics: Tensor) -> Tensor:
        """Of [k, r] of every rank, [t, k, r], complete after `finish` on the result where there is a group."""
        if self.group is None:
            return statistics[None]
        return start_all_gather(statistics, self.group).view(self.group.size, *statistics.shape)

    def combine(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """From [t, k, r]: losses [r], and factors [r] from a softmax over this rank's columns to the gradient's term.

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

    def statistics(self, logits: Tensor, labels: Tensor, work: Tensor) -> Tensor:
        """[3 or 4, r] of logits [r, columns]: maximum, sum of exp(logit - maximum), the label's logit (zero where
        another rank has it) and, for smoothing, the sum of logits. `work` is of `work_buffers`."""
        return self._statistics(logits, labels, work)[0]

    def losses(self, logits: Tensor, labels: Tensor, upstream: Tensor | None, work: Tensor) -> Tensor:
        """The losses [r] of tokens whose logits are all here; with `upstream` [r], gradients in place of the logits."""
        statistics, probabilities = self._statistics(logits, labels, work)
        losses, factor = self.combine(statistics[None])
        if upstream is not None:
            self._differentiate(logits, statistics, probabilities, labels, factor, upstream)
        return losses

    def differentiate(
        self, logits: Tensor, statistics: Tensor, labels: Tensor, factor: Tensor, upstream: Tensor, work: Tensor
    ) -> None:
        """The gradient of sum(upstream [r] * losses [r]) in place of the logits, of which `statistics` are [k, r].

        d loss / d logit = probability * (1 + 2 z logsumexp) - (1 - s) [is label] - s / vocab_size, 0 for padding.
        """
        probabilities = softmax(logits, work)[1] if self.real and not torch.compiler.is_compiling() else None
        self._differentiate(logits, statistics, probabilities, labels, factor, upstream)

    def _statistics(self, logits: Tensor, labels: Tensor, work: Tensor) -> tuple[Tensor, Tensor | None]:
        """With the probabilities, unless a compiler makes it one kernel that writes nothing as large as the logits."""
        if not self.real:
            statistics = work.new_zeros(4 if self.label_smoothing else 3, *labels.shape)
            statistics[0] = -torch.inf
            return statistics, None
        if torch.compiler.is_compiling():
            wide, probabilities = logits.to(work.dtype), None
            maxima = wide.amax(-1, keepdim=True)  # the form in which inductor takes maximum and sum in one pass
            sums = (wide - maxima).exp().sum(-1, keepdim=True)
            # As many columns as in the other sums, to be taken with them.
            real = torch.where(torch.arange(wide.shape[1], device=wide.device) < self.real, wide, 0.0)
        else:
            wide, probabilities = softmax(logits, work)
            maxima = wide.amax(-1, keepdim=True)
            sums = probabilities.amax(-1, keepdim=True).reciprocal_()  # the largest cannot underflow, the label's can
            real = wide[:, : self.real]
        column, is_here = self._column(labels)
        label_logits = wide.gather(1, column[:, None])[:, 0]
        if is_here is not None:
            label_logits = torch.where(is_here, label_logits, 0.0)
        rows = [maxima[:, 0], sums[:, 0], label_logits]
        rows += [real.sum(-1, dtype=work.dtype)] if self.label_smoothing else []
        return torch.stack([row.to(work.dtype) for row in rows]), probabilities

    def _differentiate(
        self,
        logits: Tensor,
        statistics: Tensor,
        probabilities: Tensor | None,
        labels: Tensor,
        factor: Tensor,
        upstream: Tensor,
    ) -> None:
        if not self.real:
            logits.zero_()
            return
        column, is_here = self._column(labels)
        of_label = (1 - self.label_smoothing) * upstream
        if is_here is not None:
            of_label *= is_here
        of_all = self.label_smoothing / self.vocab_size * upstream
        if probabilities is None:  # one kernel, of which a scatter cannot be part
            columns = torch.arange(logits.shape[1], device=logits.device)
            maxima, sums = statistics[:2, :, None]
            gradient = (logits.to(sums.dtype) - maxima).exp() * (factor * upstream / sums[:, 0])[:, None]
            gradient -= torch.where(columns == column[:, None], of_label[:, None], 0.0)
            if self.label_smoothing:
                gradient -= torch.where(columns < self.real, of_all[:, None], 0.0)
        else:
            gradient = probabilities.mul_((factor * upstream)[:, None])
            gradient.scatter_add_(1, column[:, None], -of_label[:, None])
            if self.label_smoothing:
                gradient[:, : self.real].sub_(of_all[:, None])
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
