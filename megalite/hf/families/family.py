"""The base of all families: how config.json and the `model.*` settings say the same, and which tensors a file has.

A family is mostly data that serves both ways. Settings of training alone (dropout, start values, the balancing loss)
are written into config.json and not read from it: they are the command's. So is a capacity, of which config.json says
nothing. No torch import.
"""

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megalite.errors.problems import plain

Found = Mapping[str, Any]  # config.json
Settings = Mapping[str, Any]  # `model.*` without the prefix: {"num_layers": 12, "moe.top_k": 2}
Beyond = tuple[str, Any, str]  # a key of config.json, its value, and the values that settings can say

WEIGHTING = ("moe.pre_softmax", "moe.normalize_weights")
GPT_ONLY = {"quantization_config": None, "transformers_weights": None}  # keys with one value in every family


class Family(ABC):
    """A family of models. Subclasses give the data, and override methods where data is not enough."""

    model_type: ClassVar[str]  # in config.json
    architecture: ClassVar[str]  # transformers' class
    prefix: ClassVar[str] = "model."  # of all tensors but the head
    has_experts: ClassVar[bool] = False
    conv1d: ClassVar[bool] = False  # weights are [in, out]; queries, keys and values of all heads follow each other
    keys: ClassVar[Mapping[str, str]]  # setting: key of config.json
    also: ClassVar[Mapping[str, str]] = {}  # more keys, and settings whose type and bounds they have
    absent: ClassVar[Mapping[str, Any]]  # transformers' values of keys that config.json lacks
    only: ClassVar[Mapping[str, Any]]  # keys of which the GPT here knows one value; absent ones have it unless `absent`
    fixed: ClassVar[Mapping[str, Any]]  # settings with one value in all models of the family
    head_size: ClassVar[int | None] = None  # where config.json does not say it; None: hidden size by heads
    modules: ClassVar[Mapping[str, Sequence[str]]]  # logical module: modules in the file (N: layer, E: expert)

    def settings(self, found: Found) -> dict[str, Any]:
        """The settings that a config.json amounts to. Its keys have the types of their settings, none is `beyond`."""
        found = {**self.absent, **found}
        settings = {**{name: found[key] for name, key in self.keys.items()}, **self.fixed}
        heads = settings["num_attention_heads"]
        size = settings.get("head_size") or self.head_size or settings["hidden_size"] // heads
        return settings | {"num_key_value_heads": settings.get("num_key_value_heads") or heads, "head_size": size}

    def describe(self, settings: Settings) -> dict[str, Any]:
        """The keys of config.json for a resolved model; the inverse of `settings` where the family can express it."""
        told = {key: settings[name] for name, key in self.keys.items()}
        about = {"model_type": self.model_type, "architectures": [self.architecture]}
        return {**about, "initializer_range": settings["init_std"], **self.only, **told}

    def beyond(self, found: Found) -> Iterator[Beyond]:
        """Keys whose value no setting says."""
        for key, value in {**GPT_ONLY, **self.only}.items():
            if (said := found.get(key, self.absent.get(key, value))) != value:
                yield key, said, plain(value)

    def other_settings(self, settings: Settings) -> dict[str, Any]:
        """The settings in which the family's nearest model differs from this one, with their values there. Empty: the
        family expresses the model exactly."""
        return differences(self.settings(self.describe(settings)), settings)


def differences(theirs: Settings, ours: Settings) -> dict[str, Any]:
    """The settings of `theirs` that make `ours` another model, with their values there."""
    others = {name: value for name, value in theirs.items() if value != ours[name]}
    if len(expert_layers(ours)) == ours["num_layers"]:  # no layer has an MLP
        others.pop("ffn_hidden_size", None)
    if "moe.num_experts" in theirs and weights_sum_to_one(theirs) == weights_sum_to_one(ours):
        others = {name: value for name, value in others.items() if name not in WEIGHTING}
    return others


def weights_sum_to_one(settings: Settings) -> bool:
    """Whether the weights of a token's experts do: then it does not matter when the softmax is taken."""
    pre_softmax, normalize = (settings[name] for name in WEIGHTING)
    return not pre_softmax or (normalize and settings["moe.top_k"] > 1)


def expert_layers(settings: Settings) -> range:
    """The layers that have experts."""
    layers = range(settings["num_layers"])[settings["moe.first_dense_layers"] :: settings["moe.layer_freq"]]
    return layers if settings["moe.num_experts"] else range(0)
