"""Device and precision of one rank."""

import itertools
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megalite.config.schema import Config, TrainConfig
from megalite.config.settings import SETTINGS, with_values
from megalite.errors.problems import UserError
from megalite.kernels.grouped import _has_kernel
from megalite.launch import device as device_module
from megalite.launch.context import CPU
from megalite.launch.device import (
    DTYPES,
    check_fp8,
    choose_device,
    choose_precision,
    slow_precision,
    use_attention,
)
from megalite.launch.process import ProcessEnvironment
from megalite.train.build import device_problems, fill_by_device, needs_of, open_context

SINGLE = ProcessEnvironment()
EIGHT_LOCAL_RANKS = ProcessEnvironment(5, 16, None, 8, "host", 1, "env")
GPU = torch.device("cuda", 0)


def _pretend_cuda(
    monkeypatch: pytest.MonkeyPatch, devices: int, *, bf16: bool = True, capability: tuple[int, int] = (9, 0)
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.mark.parametrize(
    ("devices", "setting", "environment", "expected"),
    [
        (0, "auto", SINGLE, "cpu"),
        (4, "auto", SINGLE, "cuda:0"),
        (4, "cpu", SINGLE, "cpu"),
        (4, "cuda", EIGHT_LOCAL_RANKS, "cuda:1"),  # without a local rank: the rank modulo the devices
        (4, "cuda", replace(EIGHT_LOCAL_RANKS, local_rank=3), "cuda:3"),
        (1, "auto", replace(EIGHT_LOCAL_RANKS, local_rank=3), "cuda:0"),  # a task that sees only its own GPU
    ],
)
def test_a_rank_has_the_device_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, devices: int, setting: str, environment: ProcessEnvironment, expected: str
) -> None:
    _pretend_cuda(monkeypatch, devices)
    assert choose_device(setting, environment) == torch.device(expected)


@pytest.mark.parametrize(("capability", "taken"), [((8, 6), False), ((8, 9), True)])
def test_fp8_needs_a_gpu_that_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: bool
) -> None:
    _pretend_cuda(monkeypatch, 1, capability=capability)
    check_fp8(None, GPU)
    check_fp8("rowwise", CPU)
    words = r"train.fp8='rowwise': Tesla V100.* cannot.*8\.9.*\n.*train\.fp8=null"
    with nullcontext() if taken else pytest.raises(UserError, match=words):
        check_fp8("rowwise", GPU)


FA4 = "pip install flash-attn-4=="


@pytest.mark.parametrize(
    ("kernels", "dtype", "heads", "words"),
    [
        ("flash", torch.bfloat16, (12, 4, 64), ""),
        ("flash", torch.float32, (12, 12, 64), "Tesla V100.*12 query and 12 key-value heads of size 64 in fp32"),
        ("cudnn", torch.float16, (12, 12, 20), r"size 20 in fp16: .*\n.*fix: train.attention=auto$"),
        ("auto", torch.bfloat16, (12, 4, 64), ""),
        ("auto", torch.float32, (12, 12, 64), r"ValueError: .*\n.*fix: train.attention=flash, or flex$"),
        ("flex", torch.float32, (12, 12, 20), ""),
        ("fa4", torch.float32, (4, 2, 64), rf".*\n.*=auto, or {FA4}"),
        ("fa4", torch.bfloat16, (4, 2, 64), ""),
    ],
)
def test_kernels_of_attention_that_cannot_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: torch.dtype, heads: tuple[int, int, int], words: str
) -> None:
    _pretend_cuda(monkeypatch, 1)
    zeros, run = torch.zeros, F.scaled_dot_product_attention
    tried: list[Any] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        tried.append((q.dtype, (q.shape[1], k.shape[1], q.shape[3])))
        if q.dtype == torch.float32 or q.shape[3] % 8:
            raise ValueError("no kernel takes these")
        return run(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    def choose(backends: list[SDPBackend], *, set_priority: bool) -> AbstractContextManager[None]:
        tried.append((backends[0], set_priority))
        return nullcontext()

    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **options | {"device": CPU}))
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(device_module, "sdpa_kernel", choose)
    monkeypatch.setattr(device_module, "activate_flash_attention_impl", tried.append)
    use_attention(kernels, CPU, dtype, heads)
    assert tried == []
    with pytest.raises(UserError, match=words) if words else nullcontext():
        use_attention(kernels, GPU, dtype, heads)
    first = SDPBackend.CUDNN_ATTENTION if kernels in ("auto", "cudnn") else SDPBackend.FLASH_ATTENTION
    expected = [*["FA4"] * (kernels == "fa4"), (first, True), (dtype, heads)]
    assert tried == ([] if kernels == "flex" else expected)


def test_additions_in_one_order_are_asked_of_torch_cublas_and_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "what torch does not take")
    monkeypatch.setattr("megalite.train.build.use_attention", lambda *given: None)
    monkeypatch.setattr("megalite.train.build.meet", Mock(side_effect=KeyError("met")))
    _pretend_cuda(monkeypatch, 1)
    try:
        for device, asked in (("cpu", True), ("cuda", False), ("cuda", True)):
            config = with_values(Config(device=device, precision="fp32"), {"train.deterministic": asked})
            with inductor.patch(deterministic=False, dynamic_scale_rblock=True):
                with pytest.raises(KeyError, match="met"):
                    open_context(config, SINGLE)
                fixed = asked and device == "cuda"
                assert (inductor.deterministic, inductor.dynamic_scale_rblock) == (fixed, not fixed)
                assert torch.are_deterministic_algorithms_enabled() == fixed
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_what_the_kind_of_device_decides() -> None:
    for device, given in itertools.product([CPU, GPU], [{}, {"train.compile": False}, {"checkpoint.async": True}]):
        config = fill_by_device(with_values(Config(), given), device)
        chosen = dict.fromkeys(["train.compile", "checkpoint.async"], device == GPU)
        assert config == with_values(Config(), {**chosen, **given})
        assert needs_of(config).background_saving == config.checkpoint.asynchronous


def test_a_run_tries_the_kernels_of_attention_with_its_dtype_and_the_heads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("megalite.train.build.use_attention", lambda *given: asked.append(given))
    heads = {"model.num_attention_heads": 4, "model.num_key_value_heads": 2, "model.head_size": 24}
    open_context(with_values(Config(device="cpu", precision="fp32"), heads), SINGLE)
    assert asked == [("auto", CPU, torch.float32, (4, 2, 24))]


def test_warnings_of_torch_that_are_not_the_users_are_not_printed() -> None:
    foreign = ["Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary"]
    foreign.append("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        open_context(Config(device="cpu"), SINGLE)
        for words in (*foreign, "of the user's own"):
            warnings.warn(words, UserWarning, stacklevel=1)
    assert [str(one.message) for one in told] == ["of the user's own"]


def test_what_is_for_cuda_is_refused_where_auto_finds_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """rules.py refuses it with device=cpu."""
    _pretend_cuda(monkeypatch, 0)
    config = Config(train=TrainConfig(attention="flash", cuda_graph=True), precision="fp32")
    with pytest.raises(UserError, match=r"(?s)train.attention='flash'.*which is cpu here.*train.cuda_graph=.*=null"):
        open_context(config, SINGLE)
    assert device_problems(config, GPU, "fp32", SINGLE) == []


@pytest.mark.parametrize(
    ("precision", "capability", "width", "taken"),
    [("bf16", (9, 0), 64, True), ("fp32", (9, 0), 64, False), ("bf16", (8, 0), 64, False), ("bf16", (9, 0), 68, False)],
)
def test_a_graph_of_experts_is_refused_where_the_host_must_know_their_rows(
    monkeypatch: pytest.MonkeyPatch, precision: str, capability: tuple[int, int], width: int, taken: bool
) -> None:
    _pretend_cuda(monkeypatch, 1, capability=capability)
    _has_kernel.cache_clear()
    config = with_values(Config(), {"model.moe.num_experts": 8, "model.moe.ffn_hidden_size": width})
    config = with_values(config, {"train.cuda_graph": True})
    found = [(problem.setting, problem.hint) for problem in device_problems(config, GPU, precision, SINGLE)]
    _has_kernel.cache_clear()
    assert found == ([] if taken else [("train.cuda_graph", "train.cuda_graph=null")])


def test_a_cpu_does_whatever_precision_is_asked_for() -> None:
    assert {"auto", *DTYPES} == set(SETTINGS["precision"].choices)
    assert {setting: choose_precision(setting, CPU) for setting in DTYPES} == DTYPES


@pytest.mark.parametrize(("amx", "avx"), [(True, False), (False, True), (False, False)])
def test_auto_is_bf16_on_a_cpu_that_has_instructions_for_it(
    amx: bool, avx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    assert choose_precision("auto", CPU) == (torch.bfloat16 if amx or avx else torch.float32)
    assert bool(slow_precision(torch.bfloat16, CPU)) != (amx or avx)
    assert not slow_precision(torch.float32, CPU)


def test_a_gpu_without_bf16_refuses_it_and_defaults_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_cuda(monkeypatch, 1, bf16=False)
    assert choose_precision("auto", GPU) == torch.float32
    with pytest.raises(UserError, match=r"V100.* cannot multiply bf16"):
        choose_precision("bf16", GPU)
    assert choose_precision("fp16", GPU) == torch.float16
