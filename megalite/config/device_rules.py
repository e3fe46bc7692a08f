"""What does not go with what a device chooses: judged by the rules, and at the start where a setting is `auto`."""

from collections.abc import Iterator
from typing import Any

from megalite.config.schema import Config


def precision_clashes(config: Config, precision: str) -> Iterator[tuple[str, str]]:
    """The settings that do not go with `precision` (fp64, fp32, bf16 or fp16), and why."""
    here = f"precision={precision}" if config.precision == precision else f"precision=auto, which is {precision} here"
    wrong = {"gradient": precision != "bf16", **dict.fromkeys(("communication", "moment"), precision == "fp64")}
    for name in wrong:
        if wrong[name] and getattr(config.optimizer, f"{name}_dtype") == "bf16":
            yield f"optimizer.{name}_dtype", f"bf16 does not go with {here}"
    if config.train.fp8 is not None and precision != "bf16":
        yield "train.fp8", f"fp8 stands in for products of bf16 numbers, and this is {here}"


def graph_obstacles(config: Config, world_size: int) -> Iterator[tuple[Any, str, str]]:
    """What a microbatch that is a CUDA graph, which repeats nothing that the host decides anew, does not go with; rows
    as in `rule.py`."""
    rule = "cannot repeat what the host decides with {1}"
    yield world_size > 1, "cuda_graph", f"is for one process, not {world_size}: hosts start what ranks exchange"
    yield config.device == "cpu", "cuda_graph device", "has no effect with {1}"
    yield config.model.moe.num_experts, "cuda_graph num_experts", rule
    yield not config.data.cross_document_attention, "cuda_graph cross_document_attention", rule
    for name in ("model.dropout", "attention_dropout", "embedding_dropout"):
        yield getattr(config.model, name.removeprefix("model.")), f"cuda_graph {name}", rule
