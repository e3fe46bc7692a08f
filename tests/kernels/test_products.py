"""Products on CPUs are the same whichever library multiplies."""

from pathlib import Path

import pytest
import torch

from megalite.kernels import products
from megalite.kernels.products import input_gradient, product

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(3, 5), (7,), (0, 2)])
@pytest.mark.parametrize("amd", [False, True])
def test_products_are_those_of_fp64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: tuple[int, ...], amd: bool
) -> None:
    used: list[torch.dtype] = []
    original = products._onednn
    monkeypatch.setattr(products, "_is_amd_with_avx512", lambda: amd)
    monkeypatch.setattr(products, "_onednn", lambda x, *given: used.append(x.dtype) or original(x, *given))
    x, weight, bias = (torch.randn(*shape, dtype=dtype) for shape in ((*rows, 6), (4, 6), (4,)))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    wanted = x.double() @ weight.double().t()
    torch.testing.assert_close(product(x, weight).double(), wanted, **tolerance)
    torch.testing.assert_close(product(x, weight, bias).double(), wanted + bias.double(), **tolerance)
    grad = torch.randn(*rows, 4, dtype=dtype)
    torch.testing.assert_close(input_gradient(grad, weight).double(), grad.double() @ weight.double(), **tolerance)
    assert used == ([torch.float32] * 3 if amd and dtype == torch.float32 else [])


@pytest.mark.parametrize(
    ("capability", "words", "faster"),
    [("AVX512", "AuthenticAMD", True), ("AVX2", "AuthenticAMD", False), ("AVX512", "GenuineIntel", False)],
)
def test_only_amd_with_avx512_takes_onednn_in_fp32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: str, words: str, faster: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {words}\n")
    assert products._is_amd_with_avx512(tmp_path / "cpuinfo") is faster
    assert not products._is_amd_with_avx512(tmp_path / "none")
