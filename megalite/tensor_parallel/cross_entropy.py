"""Cross entropy where each rank has the logits of some columns of the vocabulary.

The loss of a token is the same number, bit for bit, on every rank, and depends on the number of ranks only by rounding,
on the padding not at all. The statistics of a rank's columns, three or four numbers per token in fp32 (fp64 in fp64),
travel in one all-gather and are combined by every rank in the same order.
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
    work: Tensor | None = None  # [r, columns], fp32 (fp64): memory for what is as large as logits; None: fresh memory

    def __post_init__(self) -> None:
        index, self.size = (0, 1) if self.group is None else (self.group.index, self.group.size)
        self.first, stop = index * self.padded_vocab // self.size, (index + 1) * self.padded_vocab // self.size
        assert self.columns == stop - self.first, (self, stop)
        self.real = max(0, min(stop, self.vocab_size) - self.first)

    def start_exchange(self, statistics: Tensor) -> Tensor:
        """Gather every rank's [k, r] as [t, k, r], complete after `finish` where there is a group."""
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

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[3 or 4, r] of logits [r, columns]: maximum, sum of exp(logit - maximum), the label's logit (zero where
        another rank has it) and, for smoothing, the sum of logits."""
        return self._statistics(logits, labels)[0]

    def losses(self, logits: Tensor, labels: Tensor, upstream: Tensor | None) -> Tensor:
        """The losses [r] of tokens whose logits are all here; with `upstream` [r], gradients in place of the logits."""
        statistics, powers = self._statistics(logits, labels)
        losses, factor = self.combine(statistics[None])
        if upstream is not None:
            self.differentiate(logits, statistics, labels, factor, upstream, powers)
        return losses

    def _statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """With exp(logit - maximum), unless a compiler makes kernels that write nothing as large as the logits."""
        if not self.real:
            shape = 4 if self.label_smoothing else 3, *labels.shape
            statistics = logits.new_zeros(shape, dtype=statistics_dtype(logits.dtype))
            statistics[0] = -torch.inf
            return statistics, None
        wide = self._widened(logits)
        maxima = wide.amax(-1, keepdim=True)
        column, is_here = self._column(labels)
        label_logits = wide.gather(1, column[:, None])[:, 0]
        if is_here is not None:
            label_logits = torch.where(is_here, label_logits, 0.0)
        rows = [label_logits]
        if self.label_smoothing:  # over as many columns as the other sums, to be taken with them
            rows.append(torch.where(self._columns(wide) < self.real, wide, 0.0).sum(-1))
        powers = self._powers(wide, maxima)  # where logits were widened, in their place
        rows = [maxima[:, 0], powers.sum(-1), *rows]
        return torch.stack(rows), None if torch.compiler.is_compiling() else powers

    def differentiate(
        self,
        logits: Tensor,
        statistics: Tensor,
        labels: Tensor,
        factor: Tensor,
        upstream: Tensor,
        powers: Tensor | None = None,
    ) -> None:
        """The gradient of sum(upstream [r] * losses [r]) in place of the logits, of which `statistics` are [k, r].

        d loss / d logit = probability * (1 + 2 z logsumexp) - (1 - s) [is label] - s / vocab_size, 0 for padding.
        """
        if not self.real:
            logits.zero_()
            return
        column, is_here = self._column(labels)
        of_label = (1 - self.label_smoothing) * upstream
        if is_here is not None:
            of_label *= is_here
        maxima, sums = statistics[:2, :, None]
        powers = self._powers(self._widened(logits), maxima) if powers is None else powers
        gradient = powers.mul_((factor * upstream)[:, None] / sums)
        if torch.compiler.is_compiling():  # one kernel, of which a scatter cannot be part
            gradient -= torch.where(self._columns(logits) == column[:, None], of_label[:, None], 0.0)
        else:
            gradient.scatter_add_(1, column[:, None], -of_label[:, None])
        if self.label_smoothing:
            of_all = self.label_smoothing / self.vocab_size * upstream
            gradient -= torch.where(self._columns(logits) < self.real, of_all[:, None], 0.0)
        logits.copy_(gradient)

    def _column(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The local column of each label, and whether it is here (None: all are); elsewhere the column is any."""
        if self.group is None:
            return labels, None
        column = labels - self.first
        inside = column.clamp(0, self.real - 1)
        return inside, inside == column

    def _columns(self, logits: Tensor) -> Tensor:
        return torch.arange(logits.shape[1], device=logits.device)

    def _widened(self, logits: Tensor) -> Tensor:
        dtype = statistics_dtype(logits.dtype)
        if self.work is None or logits.dtype == dtype:
            return logits.to(dtype)
        return self.work[: len(logits)].copy_(logits)

    def _powers(self, wide: Tensor, maxima: Tensor) -> Tensor:
        """exp(logit - maximum) [r, columns]"""
        if self.work is None:
            return (wide - maxima).exp()
        return torch.sub(wide, maxima, out=self.work[: len(wide)]).exp_()
