"""The names of torch, Hydra and OmegaConf that are not public, and why each is used all the same.

`bash scripts/test.sh --latest` looks for them in the newest releases.
"""

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

PACKAGE = Path(__file__).parents[1] / "megalite"
LIBRARIES = {"torch", "hydra", "omegaconf"}
OF_PYTHON = {"_current_frames", "_exit", "_replace", "_target_"}  # and a key of Hydra's configs
WITH_STATISTICS = "the public function keeps the log-sum-exp, with which tiles are merged, to itself"
AT_THE_GROUP = "the public function has another name since torch 2.13, and warns under the old one"
IN_PLACE = "an update of flat buffers that waits for nothing: torch.optim's classes have state of their own"
OF_NCCL = "an abort of all communicators in one group of NCCL (pytorch#119797) has no public name"
PRIVATE = {
    "torch.ops.aten._scaled_dot_product_flash_attention": WITH_STATISTICS,
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": WITH_STATISTICS,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": WITH_STATISTICS,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": WITH_STATISTICS,
    "torch.ops._c10d_functional": "collectives that torch.compile takes into a graph; the public wrappers wait at once",
    "torch.distributed.ProcessGroup._allgather_base": AT_THE_GROUP,
    "torch.distributed.ProcessGroup._reduce_scatter_base": AT_THE_GROUP,
    "torch.distributed.ProcessGroup._get_backend": OF_NCCL,
    "torch.distributed.ProcessGroupNCCL._group_start": OF_NCCL,
    "torch.distributed.ProcessGroupNCCL._group_end": OF_NCCL,
    "torch.distributed.ProcessGroupNCCL.Options._timeout": "new_group warns where it differs from its own argument",
    "torch.distributed.distributed_c10d._set_pg_timeout": "public since torch 2.14 alone, as dist.set_timeout",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "parallel.async_tp: memory that a group shares",
    "torch._C._distributed_c10d": "torch.distributed exports TCPStore, but not to type checkers",
    "torch._inductor.config": "its settings of determinism have no public place",
    "torch._inductor.async_compile._pool_set": "workers that do not end hold up Python (pytorch#162199)",
    "torch._scaled_mm": "what GPUs have run; torch.nn.functional.scaled_mm takes its scales in another form",
    "torch._softmax_backward_data": "the gradient of a softmax from its result, in one pass",
    "torch._fused_adamw_": IN_PLACE,
    "torch._foreach_copy_": IN_PLACE,
    "torch._foreach_div_": IN_PLACE,
    "torch._foreach_sub_": IN_PLACE,
    "torch.Tensor._version": "sees that an input was changed in place before backward computes again",
    "torch.cuda.memory._dump_snapshot": "torch's guide names it; no public name writes what its viewer reads",
    "torch.cpu._is_amx_tile_supported": "whether bf16 is fast has no public question",
    "torch.cpu._is_avx512_bf16_supported": "whether bf16 is fast has no public question",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> Iterator[str]:
    """Private names that a file imports of the libraries, or takes from an object that is not its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{module}.{each.name}".strip(".") for each in node.names):
                if name.split(".")[0] in LIBRARIES:
                    yield from filter(is_private, name.split("."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] not in ("self", "cls"):
            yield from filter(is_private, [node.attr])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "sys.modules.get"):
            words = [each.value for each in node.args if isinstance(each, ast.Constant)]
            texts = [word for word in words if isinstance(word, str)]
            yield from (name for text in texts for name in text.split(".") if is_private(name))


def own_names() -> set[str]:
    """Private names that megalite defines."""
    nodes = [node for path in PACKAGE.glob("**/*.py") for node in ast.walk(ast.parse(path.read_text()))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return defined | {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def test_each_private_name_has_its_reason() -> None:
    used = {name for path in PACKAGE.glob("**/*.py") for name in private_names(path)} - OF_PYTHON
    listed = {part for name in PRIVATE for part in name.split(".") if is_private(part)}
    assert used - (own_names() - listed) == listed


@pytest.mark.parametrize("name", PRIVATE)
def test_the_installed_release_has_the_name(name: str) -> None:
    if "NCCL" in name and not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    if name.endswith("_set_pg_timeout") and hasattr(dist, "set_timeout"):
        return  # the public one
    pkgutil.resolve_name(name)
