"""Rules about the model: heads, positions and experts."""

from collections.abc import Iterator
from math import pi

from megalite.config.rule import Case, Row


def heads_have_sizes(case: Case) -> Iterator[Row]:
    model = case.derived.model
    heads, width, size = model.num_attention_heads, model.hidden_size, model.head_size
    splits = bool(case.config.model.head_size) or width % heads == 0
    odd = splits and size % 2 and model.position == "rope"
    yield not splits, "hidden_size num_attention_heads head_size", "does not split over {1}"
    yield heads % model.num_key_value_heads, "num_key_value_heads num_attention_heads", "does not divide {1}"
    yield odd, "head_size position model.hidden_size", "must be even: {1} turns pairs of numbers"


def positions_suit_the_sequence(case: Case) -> Iterator[Row]:
    model, length = case.derived.model, case.config.train.seq_length
    beyond = model.position == "learned" and length > model.max_positions
    yield beyond, "seq_length max_positions position", "longer than the table of learned positions, {1}"


def rotary_scaling_is_told_in_full(case: Case) -> Iterator[Row]:
    model, kind = case.config.model, case.config.model.rope_scaling
    before = case.given("model.rope_original_positions")
    idle = model.rope_scaling_factor == 1
    yield idle and kind != "llama3", "rope_scaling rope_scaling_factor", "has no effect with {1}"
    if idle or kind == "linear" or model.position != "rope":
        return
    rule = "must be set, to the context length before scaling: {1} counts turns in it"
    yield before is None, "rope_original_positions rope_scaling", rule
    if kind == "llama3":
        low = model.rope_low_frequency_factor
        names = "rope_high_frequency_factor rope_low_frequency_factor"
        yield model.rope_high_frequency_factor <= low, names, "must be above {1} where positions are scaled"
        return
    slow, scales = model.rope_beta_slow, (model.rope_mscale, model.rope_mscale_all_dim)
    yield model.rope_beta_fast <= slow, "rope_beta_fast rope_beta_slow", "must be above {1}"
    yield model.rope_theta <= 1, "rope_theta", "must be above 1 with model.rope_scaling=yarn: frequencies fall"
    few = before is not None and before <= 2 * pi * slow  # the first pair turns most, by one radian for each position
    yield few, "rope_original_positions rope_beta_slow", "no dimension turns {1} times in so few"
    both = model.rope_attention_factor is not None and scales != (None, None)
    yield both, "rope_attention_factor rope_mscale rope_mscale_all_dim", "stands in place of {1} and {2}: one of both"
    for name, other in (("rope_mscale", "rope_mscale_all_dim"), ("rope_mscale_all_dim", "rope_mscale")):
        alone = getattr(model, name) is not None and getattr(model, other) is None
        yield alone and not both, f"{name} {other}", "has no effect with {1}"


def routing_is_possible(case: Case) -> Iterator[Row]:
    moe = case.config.model.moe
    experts, k, groups, chosen = moe.num_experts, moe.top_k, moe.num_groups, moe.top_k_groups
    if not experts:
        return
    few = chosen <= groups and experts % groups == 0 and experts // groups * chosen < k <= experts
    dropped = moe.capacity_factor is not None and moe.capacity_factor * k < 1
    yield experts % groups, "num_experts num_groups", "does not split over {1}"
    yield chosen > groups, "top_k_groups num_groups", "there are {1}"
    yield k > experts, "top_k num_experts", "there are {1}"
    yield few, "top_k top_k_groups num_groups num_experts", "more experts than a token's groups hold ({1}, {2}, {3})"
    yield (
        k % chosen,
        "top_k top_k_groups",
        "not a multiple of {1}: a group is worth its best top_k / top_k_groups scores",
    )
    yield dropped, "capacity_factor top_k", "with {1} all experts together take fewer than one choice of each token"
    softmax, weights = moe.score == "softmax", case.config.checkpoint.init_from
    after = softmax and not moe.pre_softmax  # of the choice: over the chosen experts alone
    rule = "a bias moves the score of one expert alone, and with {1} all depend on all"
    yield softmax and moe.expert_bias_rate, "expert_bias_rate score", rule
    rule = "a softmax over one expert is 1 whatever the router says, so it learns nothing ({1})"
    yield after and k == 1 and weights is None, "top_k pre_softmax score", rule  # the weights of others are as they are
    rule = "the softmax over the chosen experts has the sum 1 as it is ({1})"
    yield after and not moe.normalize_weights, "normalize_weights pre_softmax score", rule


def ranks_hold_as_many_experts(case: Case) -> Iterator[Row]:
    yield case.config.model.moe.num_experts % case.config.parallel.ep, "num_experts ep", "does not split over {1}"


def experts_have_places(case: Case) -> Iterator[Row]:
    model, axes, moe = case.derived.model, case.derived.parallel, case.config.model.moe
    modules, width = case.config.train.recompute_modules, model.moe.ffn_hidden_size
    none, left = not moe.num_experts, model.num_layers - moe.first_dense_layers
    yield none and axes.etp != axes.tp, "etp num_experts tp", "has no effect with {1}"
    yield none and "moe" in modules, "recompute_modules num_experts", "moe has no effect with {1}"
    if none:
        return
    alone = axes.tp > 1 and not axes.sequence_parallel
    rare = 0 < left < moe.layer_freq
    yield left < 1, "first_dense_layers num_layers", "leaves no layer with experts ({1})"
    yield rare, "layer_freq num_layers first_dense_layers", "more than the layers that are left, {1} less {2}"
    yield width % axes.etp, "moe.ffn_hidden_size etp", "does not split over {1}"
    rule = "times {1}, the width of all shared experts together, does not split over {2}"
    yield width * moe.num_shared_experts % axes.tp, "moe.ffn_hidden_size num_shared_experts tp", rule
    yield alone, "sequence_parallel tp", "experts need it with {1}: each rank routes its own part of the sequence"


MODEL_RULES = (
    *(heads_have_sizes, positions_suit_the_sequence, rotary_scaling_is_told_in_full),
    *(routing_is_possible, ranks_hold_as_many_experts, experts_have_places),
)
