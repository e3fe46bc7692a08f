"""Parameters and FLOPs of a GPT, and the dense peak of devices, as pure arithmetic. No torch import.

Model FLOPs follow PaLM (Chowdhery et al. 2022, appendix B): forward and backward need 6 FLOPs per matrix parameter and
token, and attention's two products 12 * layers * width of all heads * sequence length. Only the experts that a token
goes through count. Embedding look-ups, norms and whatever is computed a second time count nothing, so that a run that
recomputes does not look faster than it is.
"""

import re
from dataclasses import replace

from megalite.config.schema import ModelConfig
from megalite.layout.parameters import ParameterRecord
from megalite.model.parameters import gpt_parameters


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the model, the padding of the vocabulary not counted. `config` is resolved."""
    return sum(record.numel for record in gpt_parameters(replace(config, vocab_multiple=1)))


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: the experts that it does not go through are not counted."""
    return sum(_active(record, config) for record in gpt_parameters(replace(config, vocab_multiple=1)))


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that multiply a token's activations: the matrices of all blocks and the head, tied or not, once."""
    records = gpt_parameters(replace(config, vocab_multiple=1, tie_embeddings=False))
    matrices = (record for record in records if record.decay and not record.name.startswith("embedding."))
    return sum(_active(record, config) for record in matrices)


def _active(record: ParameterRecord, config: ModelConfig) -> int:
    return record.numel // config.moe.num_experts * config.moe.top_k if record.of_experts else record.numel


def flops_per_token(config: ModelConfig, seq_length: int, *, causal: bool) -> float:
    """Model FLOPs per trained token. `causal` counts only the half of the attention matrix that a causal model uses."""
    attention = 12 * config.num_layers * config.num_attention_heads * config.head_size * seq_length
    return 6 * matmul_parameters(config) + attention * (0.5 if causal else 1.0)


# Dense peak in FLOP/s by pattern in the device's name and torch dtype: the vendors' data sheets, without 2:4 sparsity,
# and for float32 without TF32 (torch's default). float16 (with sums in fp32) is as fast as bfloat16 where it is left
# out. First match wins, so variants stand before their family.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bMIG\b|\bLaptop\b|\b4090 D\b|\b5090 D\b", {}),  # slower than the full device of the same name
    (r"\bGB300\b", {"bfloat16": 2500e12}),
    (r"\bGB200\b", {"bfloat16": 2500e12, "float32": 80e12, "float64": 40e12}),
    (r"\bB300\b", {"bfloat16": 2250e12}),
    (r"\bB200\b", {"bfloat16": 2250e12, "float32": 75e12, "float64": 37e12}),
    (r"\bH200\b.*\bNVL\b", {"bfloat16": 835e12, "float32": 60e12, "float64": 60e12}),
    (r"\b(GH200|H200)\b", {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}),
    (r"\bH100\b.*\bNVL\b", {"bfloat16": 835e12, "float32": 60e12, "float64": 60e12}),
    (r"\bH100\b.*\bPCIe\b", {"bfloat16": 756e12, "float32": 51e12, "float64": 51e12}),
    (r"\bH100\b", {"bfloat16": 989e12, "float32": 67e12, "float64": 67e12}),
    (r"\bH800\b", {"bfloat16": 989e12, "float32": 67e12}),
    (r"\bH20\b", {"bfloat16": 148e12, "float32": 44e12}),
    (r"\b(A100|A800)\b", {"bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12}),
    (r"\bA40\b", {"bfloat16": 149.7e12, "float32": 37.4e12}),
    (r"\bA30\b", {"bfloat16": 165e12, "float32": 10.3e12, "float64": 10.3e12}),
    (r"\bA10G\b", {"bfloat16": 70e12, "float32": 35e12}),
    (r"\bA10\b", {"bfloat16": 125e12, "float32": 31.2e12}),
    (r"\bA6000\b", {"bfloat16": 154.8e12, "float32": 38.7e12}),
    (r"\bL40S\b", {"bfloat16": 362e12, "float32": 91.6e12}),
    (r"\bL40\b", {"bfloat16": 181e12, "float32": 90.5e12}),
    (r"\bL4\b", {"bfloat16": 121e12, "float32": 30.3e12}),
    (r"\b(RTX )?5090\b", {"bfloat16": 209.5e12, "float32": 104.8e12}),
    (r"\b(RTX )?4090\b", {"bfloat16": 165.2e12, "float32": 82.6e12}),
    (r"\b(RTX )?3090\b", {"bfloat16": 71e12, "float32": 35.6e12}),
    (r"\bV100\b.*\bSXM", {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}),
    (r"\bV100\b.*\bPCIE\b", {"float16": 112e12, "float32": 14e12, "float64": 7e12}),
    (r"\bMI355X?\b", {"bfloat16": 2500e12, "float32": 157.3e12, "float64": 78.6e12}),
    (r"\bMI325X?\b", {"bfloat16": 1307e12, "float32": 163.4e12, "float64": 163.4e12}),
    (r"\bMI300X\b", {"bfloat16": 1307e12, "float32": 163.4e12, "float64": 163.4e12}),
    (r"\bMI250X?\b", {"bfloat16": 191.5e12, "float32": 47.9e12, "float64": 47.9e12}),  # per die: torch sees two devices
)


def peak_flops(device_name: str, dtype_name: str) -> float | None:
    """Dense peak of a device in a dtype (bfloat16, float16, float32, float64); None where unknown: there is no MFU."""
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peaks.get(dtype_name, peaks.get("bfloat16") if dtype_name == "float16" else None)
    return None
