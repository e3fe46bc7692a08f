"""What does not go with what a device chooses: judged by the rules, and at the start where a setting is `auto`."""

from collections.abc import Iterator

from megalite.config.schema import Config
from megalite.config.settings import value_of, yaml_value


def precision_clashes(config: Config, precision: str) -> Iterator[tuple[str, str]]:
    """The settings that do not go with `precision` (fp64, fp32, bf16 or fp16), and why."""
    here = f"precision={precision}" if config.precision == precision else f"precision=auto, which is {precision} here"
    if config.optimizer.gradient_dtype == "bf16" and precision != "bf16":
        yield "optimizer.gradient_dtype", f"only with precision=bf16 are gradients bf16, and this is {here}"
    if config.train.fp8 is not None and precision != "bf16":
        yield "train.fp8", f"fp8 stands in for products of bf16 numbers, and this is {here}"
    for name in ("optimizer.communication_dtype", "optimizer.moment_dtype"):
        if precision == "fp64" and value_of(config, name) == "bf16":
            yield name, f"with {here} everything is fp64"


def graph_obstacles(config: Config, world_size: int) -> Iterator[tuple[str, list[str]]]:
    """Why a microbatch cannot be a CUDA graph, which repeats nothing that the host decides anew, and by which
    settings."""
    names = [f"model.{kind}dropout" for kind in ("", "attention_", "embedding_")]
    if config.device == "cpu":
        yield "has no effect with device=cpu", []
    if world_size > 1:
        yield f"is for one process, not {world_size}: hosts start what ranks exchange", []
    if config.model.moe.num_experts:
        yield "cannot repeat experts, whose rows the host must count", []
    if dropped := [name for name in names if value_of(config, name)]:
        shown = " and ".join(f"{name}={yaml_value(value_of(config, name))}" for name in dropped)
        yield f"cannot repeat dropout ({shown})", dropped
    if not config.data.cross_document_attention:
        name = "data.cross_document_attention"
        yield f"cannot repeat masks of documents ({name}=false)", [name]
