"""What does not go with what a device chooses: judged by the rules, and at the start where a setting is `auto`."""

from collections.abc import Iterator

from megalite.config.schema import Config
from megalite.config.settings import value_of


def precision_clashes(config: Config, precision: str) -> Iterator[tuple[str, str]]:
    """The settings that do not go with `precision` (fp64, fp32, bf16 or fp16), and why."""
    here = f"precision={precision}" if config.precision == precision else f"precision=auto, which is {precision} here"
    bf16 = [
        name for name in ("gradient", "communication", "moment") if getattr(config.optimizer, f"{name}_dtype") == "bf16"
    ]
    for name in bf16:
        if precision == "fp64" or (name == "gradient" and precision != "bf16"):
            yield f"optimizer.{name}_dtype", f"bf16 does not go with {here}"
    if config.train.fp8 is not None and precision != "bf16":
        yield "train.fp8", f"fp8 stands in for products of bf16 numbers, and this is {here}"


def graph_obstacles(config: Config, world_size: int) -> Iterator[tuple[str, list[str]]]:
    """Why a microbatch cannot be a CUDA graph, which repeats nothing that the host decides anew, and by which
    settings."""
    if world_size > 1:
        yield f"is for one process, not {world_size}: hosts start what ranks exchange", []
    for name in (f"model.{kind}dropout" for kind in ("", "attention_", "embedding_")):
        if value_of(config, name):
            yield "cannot repeat dropout ({1})", [name]
    for wrong, name in (
        (config.device == "cpu", "device"),
        (config.model.moe.num_experts, "model.moe.num_experts"),
        (not config.data.cross_document_attention, "data.cross_document_attention"),
    ):
        if wrong:
            yield "is not for {1}", [name]
