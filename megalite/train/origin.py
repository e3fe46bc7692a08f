"""Where what is not finite arose. A step that was not applied for that is computed once more, and watched.

Good steps pay nothing for it. Forward and backward run on the same samples with the same dropout; no gradient is summed
over data-parallel ranks, so that each rank sees its own. Nothing of the run changes: the next step forgets gradients.
On CUDA the step behind the bad one may have moved the weights meanwhile. So may other orders of additions: what is not
found again is said to be so.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.data.batches import StepBatches
from megalite.model.gpt import unseen
from megalite.optim.rank_buffers import records_of_model
from megalite.optim.zero import part_of
from megalite.pipeline.actions import Action

if TYPE_CHECKING:
    from megalite.train.loop import Job

Place = tuple[int, str, list[int]]  # its place in forward's order, name, samples of its microbatch if they are known
NOT_AGAIN = "nothing: all was finite when the step was computed again"

NO_MEMORY = {"arose_in": "unknown: no memory to compute the step again"}


def find_origin(job: "Job", data: StepBatches, tokens: int, loss_scale: float | None) -> dict[str, Any]:
    """Words for the event of a step on `data` with these tokens in all: what was first not finite, in forward's order a
    weight, an output or the loss, else in backward's order a gradient; on which ranks, and how many gradients were not.
    Collective."""
    training, order = job.training, [record.name for record in records_of_model(job.config)]
    parts = [*dict.fromkeys(map(part_of, order))]
    training.gather.finish()
    outputs, own = dict[tuple[str, int], Tensor](), training.buffers
    weights = _not_finite((name, own.parameter(name)) for name in own.places)

    def note(part: str, x: Tensor) -> None:
        at = training.executor.at
        assert isinstance(at, Action)
        if part in parts:
            outputs[part, at.microbatch] = torch.isfinite(x).all()

    own.start_step()
    share = torch.full((), (loss_scale or 1.0) / tokens, dtype=own.master_dtype, device=own.device)
    expected, training.executor.expect_last_gradients = training.executor.expect_last_gradients, lambda *_: None
    try:
        for chunk in training.chunks:
            chunk.after_part = note
        with training.executor.recording():  # no CUDA graph, which calls nobody
            loss = training.executor.forward_backward(data.microbatches, share)
    except torch.OutOfMemoryError:
        job.context.gather_json([])
        return NO_MEMORY
    finally:
        training.executor.expect_last_gradients = expected
        for chunk in training.chunks:
            chunk.after_part = unseen
    gradients = _not_finite((name, own.gradient(name)) for name in own.places)

    def in_backward(name: str) -> int:
        """A tied embedding where the pipeline ends has the head's gradient, the first."""
        is_head = part_of(name) == "embedding" and not training.embeds
        return -len(order) if is_head else -order.index(name)

    found: list[list[Place]] = [
        [(order.index(name), f"weight {name}", []) for name in weights],
        [
            (parts.index(part), f"output of {part}", data.microbatches[at].samples.tolist())
            for (part, at), finite in outputs.items()
            if not finite
        ],
        [] if torch.isfinite(loss) else [(0, "loss", [])],
        [(in_backward(name), f"gradient of {name}", []) for name in gradients],
    ]
    everyone = job.context.gather_json([min(places, default=None) for places in found] + [len(gradients)])
    if [] in everyone:
        return NO_MEMORY
    for kind in range(len(found)):
        if known := [(of_rank[kind], rank) for rank, of_rank in enumerate(everyone) if of_rank[kind]]:
            (at, words, samples), _ = min(known)
            ranks = [rank for (place, _, _), rank in known if place == at]
            told = {"samples": samples} if samples else {}
            return {"arose_in": words, "ranks": ranks, **told, "gradients": max(of_rank[-1] for of_rank in everyone)}
    return {"arose_in": NOT_AGAIN}


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors with an element that is not finite, found with one wait for the device."""
    names, flags = [], []
    for name, tensor in tensors:
        names.append(name)
        flags.append(torch.isfinite(tensor).all())
    finite = torch.stack(flags).tolist() if flags else []
    return [name for name, is_finite in zip(names, finite, strict=True) if not is_finite]
