"""Chooses a rank's device and its precision. Nothing here communicates."""

import os
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

from megalite.errors.problems import Problem, UserError, shortened
from megalite.launch.process import ProcessEnvironment

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}  # what the setting calls each dtype
FLASH_ATTENTION_4 = "flash-attn-4==4.0.0b18"
# With a mask, cuDNN's backward gives NaN for some shapes on Hopper (https://github.com/pytorch/pytorch/issues/196678).
FOR_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# By train.attention, torch's kernels in the order in which they are tried. torch itself tries flash first; with cuDNN a
# whole step of GPT-2 of 124M is 6 % faster on an H100.
KERNELS = {
    "auto": [SDPBackend.CUDNN_ATTENTION, *FOR_MASKS],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "fa4": [SDPBackend.FLASH_ATTENTION],  # which `use_attention` has exchanged
    "flex": FOR_MASKS,  # where flex attention cannot be: not compiled, or with dropout on the probabilities
}


def choose_device(setting: str, environment: ProcessEnvironment) -> torch.device:
    """`setting` is auto, cpu or cuda; auto takes CUDA where it is present. A rank's GPU is number LOCAL_RANK (else its
    rank) modulo the devices it sees: SLURM may show each task its own GPU alone."""
    present = torch.cuda.is_available()
    if setting == "cuda" and not present:
        rule = f"no usable CUDA device: torch {torch.__version__} for CUDA {torch.version.cuda} sees none (nvidia-smi)"
        raise UserError(Problem("device", "cuda", rule, "device=cpu, or auto"))
    if setting == "cpu" or not present:
        return torch.device("cpu")
    local_rank = environment.rank if environment.local_rank is None else environment.local_rank
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_precision(setting: str, device: torch.device) -> torch.dtype:
    """`setting` is auto or one of DTYPES; auto is bf16 where the hardware multiplies bf16 matrices, else fp32."""
    if setting == "auto":
        return torch.bfloat16 if _has_fast_bf16(device) else torch.float32
    if setting == "bf16" and device.type == "cuda" and not _has_fast_bf16(device):
        _refuse(device, "precision", "bf16", "cannot multiply bf16 matrices", "precision=fp32, fp16 or auto")
    return DTYPES[setting]


def check_fp8(recipe: str | None, device: torch.device) -> None:
    """Refuse train.fp8 on a GPU that cannot multiply fp8 matrices."""
    if recipe is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        _refuse(device, "train.fp8", recipe, "cannot multiply fp8 matrices (8.9, Ada, can)", "train.fp8=null")


def use_attention(kernels: str, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Try kernels of train.attention once, and refuse those that cannot run: what they take differs by GPU, torch and
    other packages. `heads`: of queries, of keys and values, and their size. fa4 makes torch's flash attention that of
    flash-attn-4, for the process. flex attention is compiled with the blocks, and not tried."""
    if device.type != "cuda" or kernels == "flex":
        return
    queries, groups, size = heads
    try:
        if kernels == "fa4":
            activate_flash_attention_impl("FA4")
        shapes = [(1, count, 128, size) for count in (queries, groups)]
        q, k = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
        with torch.cuda.device(device), sdpa_kernel(KERNELS[kernels], set_priority=True):
            out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=queries != groups)
            out.sum().backward()
    except Exception as error:  # whatever another package raises
        shape = f"{queries} query and {groups} key-value heads of size {size} in {PRECISIONS[dtype]}"
        rule = f"does not run them with {shape}: {type(error).__name__}: {shortened(str(error))}"
        hint = {"auto": "flash, or flex", "fa4": f"auto, or pip install {FLASH_ATTENTION_4}"}.get(kernels, "auto")
        _refuse(device, "train.attention", kernels, rule, f"train.attention={hint}")


def fix_order() -> None:
    """From now on CUDA adds in one order in this process: in kernels of torch, cuBLAS and inductor, which otherwise
    chooses by time what a kernel sums in one go."""
    import torch._inductor.config as inductor

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS shares its work out by what is free
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    inductor.deterministic, inductor.dynamic_scale_rblock = True, False


def _refuse(device: torch.device, setting: str, value: str, rule: str, hint: str) -> NoReturn:
    raise UserError(Problem(setting, value, f"{torch.cuda.get_device_name(device)} {rule}", hint))


def slow_precision(dtype: torch.dtype, device: torch.device) -> str:
    """What to say of a precision that the device computes many times slower than fp32, if anything."""
    slow = device.type == "cpu" and dtype == torch.bfloat16 and not _has_fast_bf16(device)
    return "this CPU has no bf16 instructions: steps may take 30 times as long as with precision=fp32" if slow else ""


def _has_fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())  # no public names
