"""Qwen3: Llama with norms over the heads of queries and keys."""

from collections.abc import Iterator

from megalite.hf.families.family import Beyond, Found
from megalite.hf.families.llama import RotaryFamily


class Qwen3(RotaryFamily):
    model_type, architecture = "qwen3", "Qwen3ForCausalLM"
    fixed, head_size = {**RotaryFamily.fixed, "qk_norm": True}, 128

    def beyond(self, found: Found) -> Iterator[Beyond]:
        yield from super().beyond(found)
        if {*map(str, found.get("layer_types") or [])} - {"full_attention"}:
            yield "layer_types", found["layer_types"], "full_attention in every layer"


FAMILY = Qwen3()
