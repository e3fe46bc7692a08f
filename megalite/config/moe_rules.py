"""The rules of a mixture of experts: what its settings and the layout must agree on."""

from collections.abc import Iterator
from math import lcm
from typing import Any

from megalite.config.derive import derive_model
from megalite.config.remedies import Case, Flaw, Rule, splits
from megalite.config.settings import SETTINGS
from megalite.errors.remedies import divisors, multiples

MOE = "model.moe"
NUM, TOP, GROUPS, TOP_GROUPS = (f"{MOE}.{name}" for name in ("num_experts", "top_k", "num_groups", "top_k_groups"))
SCORE, PRE, WIDTH = f"{MOE}.score", f"{MOE}.pre_softmax", f"{MOE}.ffn_hidden_size"
RECOMPUTE = "train.recompute_modules"


def settings_of_experts_need_some(case: Case) -> Iterator[Flaw]:
    """Except what comes from a preset whose experts the command takes away."""
    moe, axes, modules = case.config.model.moe, case.config.parallel, case.config.train.recompute_modules
    if moe.num_experts:
        return
    departures = case.config.departures
    own = [name for name in SETTINGS if name in departures] if NUM in departures else SETTINGS
    unit = lcm(8, axes.ep, moe.num_groups)
    some = -(-moe.top_k // unit) * unit
    asked = {name: SETTINGS[name].default for name in own if name.startswith(f"{MOE}.")}
    asked = {name: default for name, default in asked.items() if case.value(name) != default}
    asked |= {"parallel.ep": 1} if axes.ep > 1 else {}
    asked |= {"parallel.etp": None} if axes.etp not in (None, axes.tp) else {}
    if "moe" in modules:
        asked[RECOMPUTE] = [one for one in modules if one != "moe"] or SETTINGS[RECOMPUTE].default
    for name, without in asked.items():
        what = "moe " if name == RECOMPUTE else ""
        yield Flaw(name, f"{what}has no effect with {NUM}=0", {NUM: [some], name: [without]})


def some_layers_have_experts(case: Case) -> Iterator[Flaw]:
    model, moe = case.config.model, case.config.model.moe
    dense, left = moe.first_dense_layers, model.num_layers - moe.first_dense_layers
    first, every = f"{MOE}.first_dense_layers", f"{MOE}.layer_freq"
    if moe.num_experts and left < 1:
        rule = f"leaves no layer of model.num_layers={model.num_layers} with experts"
        yield Flaw(first, rule, {first: [model.num_layers - 1], "model.num_layers": range(dense + 1, dense + 33)})
    elif moe.num_experts and moe.layer_freq > left:
        behind = f", of which {dense} are dense at the start" if dense else ""
        needed = dense + moe.layer_freq
        fixes: dict[str, Any] = {every: divisors(left, moe.layer_freq), "model.num_layers": range(needed, needed + 32)}
        yield Flaw(every, f"more than the layers, model.num_layers={model.num_layers}{behind}", fixes)


def tokens_choose_among_enough_experts(case: Case) -> Iterator[Flaw]:
    moe = case.config.model.moe
    experts, k, groups, chosen = moe.num_experts, moe.top_k, moe.num_groups, moe.top_k_groups
    if not experts:
        return
    if groups > 1:
        yield from splits(case, NUM, GROUPS)
    if chosen > groups:
        yield Flaw(TOP_GROUPS, f"there are {case.show(GROUPS)}", {TOP_GROUPS: [groups]})
    if k > experts:
        unit = lcm(groups, case.config.parallel.ep)
        yield Flaw(TOP, f"there are {case.show(NUM)}", {TOP: [experts], NUM: multiples(unit, k)})
    elif chosen <= groups and experts % groups == 0 and k > (offered := experts // groups * chosen):
        rule = f"{chosen} of {groups} groups hold {offered} of {experts} experts"
        yield Flaw(TOP, rule, {TOP: [offered], TOP_GROUPS: range(chosen + 1, groups + 1)})
    elif 1 < chosen <= groups and k % chosen:
        rule = f"not a multiple of {case.show(TOP_GROUPS)}: a group is worth its best {TOP} / {TOP_GROUPS} scores"
        yield Flaw(TOP, rule, {TOP: multiples(chosen, k), TOP_GROUPS: divisors(k, chosen)})


def router_options_agree(case: Case) -> Iterator[Flaw]:
    moe = case.config.model.moe
    if not moe.num_experts:
        return
    softmax, of_chosen = moe.score == "softmax", moe.score == "softmax" and not moe.pre_softmax
    if softmax and moe.expert_bias_rate:
        rate = f"{MOE}.expert_bias_rate"
        rule = f"a bias moves the score of one expert alone, and with {case.show(SCORE)} all depend on all"
        yield Flaw(rate, rule, {SCORE: ["sigmoid"], rate: [0.0]})
    if not softmax and moe.pre_softmax:
        yield Flaw(PRE, f"has no effect with {case.show(SCORE)}", {PRE: [False], SCORE: ["softmax"]})
    if of_chosen and moe.top_k == 1 and case.config.checkpoint.init_from is None:  # weights of others are as they are
        rule = f"a softmax over one expert is 1 whatever the router says, so it learns nothing ({case.show(PRE)})"
        yield Flaw(TOP, rule, {PRE: [True], TOP: [2], SCORE: ["sigmoid"]})
    if of_chosen and not moe.normalize_weights:
        name = f"{MOE}.normalize_weights"
        rule = f"the softmax over the chosen experts has the sum 1 as it is ({case.show(PRE)})"
        yield Flaw(name, rule, {name: [True], PRE: [True], SCORE: ["sigmoid"]})
    if moe.capacity_factor is not None and moe.capacity_factor * moe.top_k < 1:
        name = f"{MOE}.capacity_factor"
        rule = f"with {case.show(TOP)} all experts together take fewer than one choice of each token"
        yield Flaw(name, rule, {name: [1.0, None]})


def each_rank_holds_as_many_experts(case: Case) -> Iterator[Flaw]:
    if case.config.model.moe.num_experts:
        yield from splits(case, NUM, "parallel.ep")


def an_expert_splits_over_its_ranks(case: Case) -> Iterator[Flaw]:
    axes, model = case.config.parallel, case.config.model
    if not model.moe.num_experts:
        return
    derived = derive_model(model, case.config.train.seq_length).moe.ffn_hidden_size
    width, etp = derived or 1, axes.etp or axes.tp
    over = "parallel.etp" if axes.etp else "parallel.tp"
    where = "" if axes.etp else ", which parallel.etp follows"
    yield from splits(case, WIDTH, over, derived=width, where=where, fixes={"parallel.etp": divisors(width, etp)})
    shared = width * model.moe.num_shared_experts
    if shared % axes.tp:
        rule = f"shared experts, {shared} wide together, do not split over {case.show('parallel.tp')}"
        yield Flaw(WIDTH, rule, {WIDTH: multiples(axes.tp, width), "parallel.tp": divisors(shared, axes.tp)})
    if axes.tp > 1 and axes.sequence_parallel is False:
        name = "parallel.sequence_parallel"
        rule = f"experts need it with {case.show('parallel.tp')}: each rank routes its own part of the sequence"
        yield Flaw(name, rule, {name: [None], "parallel.tp": [1]})


def expert_instances_split_the_replicas(case: Case) -> Iterator[Flaw]:
    axes, optimizer, world = case.config.parallel, case.config.optimizer, case.world_size
    ranks = (axes.etp or axes.tp) * axes.ep * axes.pp
    if not case.config.model.moe.num_experts or not optimizer.zero or world % ranks:
        return
    replicas, name = world // ranks, "optimizer.instances"
    if replicas % optimizer.instances:
        rule = f"does not divide edp = {replicas}, the ranks that hold the same experts"
        yield Flaw(name, rule, {name: divisors(replicas, optimizer.instances)})


MOE_RULES: tuple[Rule, ...] = (
    *(settings_of_experts_need_some, some_layers_have_experts, tokens_choose_among_enough_experts),
    *(router_options_agree, each_rank_holds_as_many_experts, an_expert_splits_over_its_ranks),
    expert_instances_split_the_replicas,
)
