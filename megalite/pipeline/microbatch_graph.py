"""Forward and backward of a microbatch as one CUDA graph: the host starts all their kernels with one call.

A graph repeats the launches of its capture, on the same addresses and with the same numbers from the host. So what
differs between microbatches is copied to tensors of its own, and gradients are added to main gradients, which stay in
place. Whatever the host decides anew in each microbatch (rows of experts, samples of dropout, exchanges between ranks,
masks of documents) cannot be in it: config/rules.py refuses it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.data.batch import Batch
from megalite.model.gpt import GPT

FIRST = 2  # microbatches before the capture: they compile, choose kernels and fill caches, which no capture can


def captured(body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """The tensor that `body` returns, and a function that fills it. Nothing is run yet."""
    graph = torch.cuda.CUDAGraph()
    # "global", the default, breaks the capture where another thread pins memory, as the reader of batches does.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = body()
    return found, graph.replay


class MicrobatchGraph:
    """Forward and backward of the microbatches of a whole model. All must have the shape of the first."""

    def __init__(self, model: GPT) -> None:
        self._model, self._seen = model, 0

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        """Adds the microbatch's gradients; its loss, as `GPT.loss` scales it."""
        self._seen += 1
        if self._seen <= FIRST:
            return self._compute(batch, scale)
        if self._seen == FIRST + 1:
            self._capture(batch, scale)
        self._batch.fill(batch)
        self._scale.copy_(scale)
        self._repeat()
        return self._loss.clone()

    def _capture(self, batch: Batch, scale: Tensor) -> None:
        self._batch, self._scale = batch.map(torch.clone), scale.clone()
        try:
            self._loss, self._repeat = captured(lambda: self._compute(self._batch, self._scale))
        except Exception as error:  # whatever a kernel's own compiler raises
            # torch is left on the capture's stream and, up to 2.11, with its memory (pytorch#180395): no way goes on.
            advice = "train.cuda_graph=false starts kernels one by one"
            raise RuntimeError(f"microbatches cannot be a CUDA graph here: {advice}") from error

    def _compute(self, batch: Batch, scale: Tensor) -> Tensor:
        loss = self._model.loss(batch, scale)
        loss.backward()
        return loss.detach()
