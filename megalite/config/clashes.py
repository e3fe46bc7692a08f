"""Values of settings that do not go together: judged by the rules, and at the start where a device has chosen some."""

from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

from megalite.config.schedule_request import SPLITTING
from megalite.config.schema import LEAST_FLEX_HEAD, Config
from megalite.config.settings import SETTINGS, value_of

NO_EFFECT = "has no effect with {1}"
FLASH = {"cudnn", "flash", "fa4"}
NOT_BF16 = {"fp64", "fp32", "fp16"}
Values = Collection[Any] | Callable[[Any], Any]  # `bool`: every value but null, 0 and false


def other_than_default(name: str) -> Values:
    return lambda value: value != SETTINGS[name].default


# Values of the setting that is refused, and those with which one of the settings that follow clashes. Some follow only
# to be named in the sentence, or tried for the hint.
CLASHES: list[tuple[str, Values, str, Values, str]] = [
    ("rope_scaling", {"linear", "yarn"}, "rope_scaling_factor", {1}, NO_EFFECT),
    ("sequence_parallel", {True}, "tp", {1}, NO_EFFECT),
    ("compile", {True}, "parallel.schedule", SPLITTING, "compiled blocks cannot put weight gradients off, as {1} does"),
    ("attention", FLASH | {"flex"}, "device", {"cpu"}, NO_EFFECT),
    ("attention", FLASH | {"flex"}, "attention_dropout", bool, f"{NO_EFFECT}, which takes plain products"),
    ("attention", FLASH | {"flex"}, "precision", {"fp64"}, "these kernels do not take {1}"),
    ("attention", FLASH, "precision", {"fp32"}, "these kernels do not take {1}"),
    ("attention", FLASH, "cross_document_attention", {False}, "these kernels do not take documents ({1})"),
    ("attention", {"cudnn", "fa4"}, "deterministic", {True}, "{1} asks for one order of additions, which these lack"),
    ("attention", {"flex"}, "compile parallel.schedule", {False}, "must be compiled, and is not with {1} and {2}"),
    ("attention", {"flex"}, "head_size", range(LEAST_FLEX_HEAD), f"takes heads from {LEAST_FLEX_HEAD} on"),
    ("async_tp", {True}, "sequence_parallel tp", {False}, NO_EFFECT),
    ("async_tp", {True}, "compile parallel.schedule", {False}, "is the compiler's, and has no effect with {1} and {2}"),
    ("async_tp", {True}, "device", {"cpu"}, NO_EFFECT),
    ("async_tp", {True}, "fp8", bool, "joins a product with what {1} rounds before"),
    ("spike_window", other_than_default("train.spike_window"), "skip_spikes", {None}, NO_EFFECT),
    ("max_bad_steps", other_than_default("train.max_bad_steps"), "rollback_after", bool, NO_EFFECT),
    ("rollback_after", bool, "checkpoint.interval", {0}, "with {1} there is no checkpoint to go back to"),
    ("expert_bias_rate", bool, "score", {"softmax"}, "with {1} a bias moves the scores of all experts"),
    ("cuda_graph", {True}, "device", {"cpu"}, NO_EFFECT),
    ("layer_norms_interval", bool, "cuda_graph", {True}, "{1} repeats kernels without a look at what they compute"),
    ("fp8", bool, "precision", NOT_BF16, "fp8 stands in for products of bf16 numbers, not with {1}"),
    ("fp8_weight_gradients", {True}, "train.fp8", {None}, NO_EFFECT),
    ("gradient_dtype", {"bf16"}, "precision", NOT_BF16, "does not go with {1}"),
    ("communication_dtype", {"bf16"}, "precision", {"fp64"}, "does not go with {1}"),
    ("moment_dtype", {"bf16"}, "precision", {"fp64"}, "does not go with {1}"),
    ("cautious", {True}, "optimizer.name", {"muon"}, "masks updates of AdamW, and does not go with {1}"),
    ("muon.dtype", bool, "precision", {"fp64"}, f"{NO_EFFECT}, in which products are fp64, too"),
    ("optimizer.name", {"muon"}, "hidden_size", {1}, "has no matrix to update with {1}"),
    ("ownership", {"even"}, "optimizer.name", {"muon"}, "{1} updates whole matrices"),
    ("qk_clip", bool, "qk_norm", {True}, "with {1} norms bound the logits, and rows of weights have no effect on them"),
    ("communication_dtype", {"fp32"}, "gradient_dtype", {"bf16"}, "with {1} it sends twice the bytes of rounded sums"),
]


@cache
def full_name(word: str) -> str:
    """The setting with the fewest words that ends on these, or the name of no setting as it is."""
    found = [name for name in SETTINGS if name == word or name.endswith(f".{word}")]
    found = [name for name in found if name.count(".") == min(each.count(".") for each in found)]
    assert len(found) < 2, f"{word} can be any of {found}"
    return found[0] if found else word


def clashes(config: Config) -> Iterator[tuple[list[str], str]]:
    """The settings that clash in a derived config, the refused one first, and the sentence."""

    def has(name: str, wanted: Values) -> bool:
        value = value_of(config, name)
        return bool(wanted(value) if callable(wanted) else value in wanted)

    for refused, values, words, clashing, sentence in CLASHES:
        name, others = full_name(refused), [*map(full_name, words.split())]
        if has(name, values) and any(has(other, clashing) for other in others):
            yield [name, *others], sentence
