"""Everything that makes a config unusable, as a list of problems; all of them are found before torch is imported.

Each setting is judged on its own before; a rule of `RULES` joins several (`rule.py` says what a rule is). What this
machine must have is in `machine_rules.py`. A rule that speaks of a setting that is already refused stays silent.
"""

import re
from collections.abc import Collection, Iterator, Set
from ctypes import c_float
from dataclasses import replace
from itertools import islice
from typing import Any

from megalite.config import layout
from megalite.config.clashes import NO_EFFECT, clashes, full_name
from megalite.config.derive import NAME, schedule_request
from megalite.config.length_rules import LENGTH_RULES, a_run_has_one_length, warms_up
from megalite.config.machine_rules import MACHINE_RULES
from megalite.config.rule import Case, Found, Rule, broken, outside, problems_of, routes, speaks_of
from megalite.config.schedule_request import CHUNKED, ScheduleRequest
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS
from megalite.config.step_plan import batch_sizes, ramp_flaw
from megalite.errors.problems import Problem
from megalite.layout.ranks import DENSE_AXES, EXPERT_AXES, EXPERT_NAME, strides_of
from megalite.layout.stages import stage_counts

BLOCK = 16  # tokens: the shortest piece of a ring's sequence that fills the rows of a matrix unit
ROUNDED = [one for one in SETTINGS.values() if one.kind in (float, list[float]) and one.group != "data"]
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

# A switch, the value of it that is needed (or a larger number, or one of a set), and settings of no effect without it.
Inert = tuple[str, Any, str]
EXPERTS = "model.moe.num_experts"
INERT: list[Inert] = [
    ("train.recompute", "selective", "recompute_modules"),
    ("train.recompute", "full", "recompute_layers"),
    ("zero", 1, "instances ownership"),
    ("position", "rope", "rope_scaling_factor"),
    ("rope_scaling", "llama3", "rope_low_frequency_factor rope_high_frequency_factor"),
    ("rope_scaling", "yarn", "rope_beta_slow rope_beta_fast rope_truncate rope_attention_factor"),
    ("rope_scaling", "yarn", "rope_mscale rope_mscale_all_dim"),
    ("cp", 2, "cp_comm cp_alltoall"),
    ("cp_comm", "alltoall+ring", "cp_alltoall"),
    ("num_experts", 1, "ep muon.router"),
    ("score", "softmax", "pre_softmax"),
    ("optimizer.name", "muon", " ".join(name for name in SETTINGS if name.startswith("optimizer.muon."))),
    ("optimizer.muon.scale", "match_adamw", "rms"),
    ("lr.schedule", "table", "lr.table"),
    ("precision", "fp16", "initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
]
# The same where the command itself gives the settings: what a preset or a recipe says besides may stay unused.
ASKED: list[Inert] = [("data.source", "hf", "subset split streaming")]
OF_EXPERTS: list[Inert] = [(EXPERTS, 1, " ".join({name for name in SETTINGS if ".moe." in name} - {EXPERTS}))]
# The same where a run says that they do nothing, and goes on: their switch is turned for a try and back.
UNUSED: list[Inert] = [
    ("tokenizer", "bpe", "bpe_vocab_size"),
    ("lr.schedule", "wsd", "decay_steps decay_tokens"),
    ("lr.schedule", {"constant", "linear", "cosine", "wsd"}, "warmup_steps warmup_tokens min_lr"),
    ("position", "rope", "rope_theta"),
    ("position", "learned", "max_positions"),
    ("sample_tokens", 1, "sample_interval sample_prompts"),
    ("eval_interval", 1, "eval_batches data.validation"),
]


def check(config: Config, world_size: int, doubtful: Set[str] = frozenset()) -> list[Problem]:
    """All problems of a config, whose values are right each on its own, on `world_size` ranks. `doubtful` settings were
    refused before they entered it."""
    found = (problem for rule in MACHINE_RULES for problem in rule(config))
    of_machine = [problem for problem in found if not speaks_of([problem.setting], doubtful)]
    return problems_of(Case(config, world_size), RULES, doubtful) + of_machine


def unused(config: Config) -> list[str]:
    """The settings of the command that do nothing in this run, in words."""
    found = broken(Case(config, 1), [lambda case: without_effect(case, UNUSED, case.config.departures)])
    return [f"{names[0]} {rule}" for names, rule in found]


def without_effect(case: Case, table: list[Inert], given: Collection[str] = SETTINGS) -> Iterator[Found]:
    """The rows of a table that are broken by settings in `given`."""
    for switch, needed, names in table:
        value = case.value(full_name(switch))
        on = value == needed or (isinstance(needed, int) and value > needed)
        on = on or (isinstance(needed, set) and value in needed)
        for name in map(full_name, () if on else names.split()):
            idle = name in given and case.given(name) not in (SETTINGS[name].default, [])
            yield idle, f"{name} {switch}", NO_EFFECT


def settings_have_an_effect(case: Case) -> Iterator[Found]:
    """What a preset says of experts that the command takes away may stay."""
    departures, optimizer = case.config.departures, case.config.optimizer
    decays = {
        optimizer.weight_decay,
        optimizer.muon.weight_decay,
        *(one.get("weight_decay") for one in optimizer.groups),
    }
    idle = optimizer.weight_decay_schedule != "constant" and decays <= {None, 0}
    yield idle, "weight_decay_schedule optimizer.weight_decay", NO_EFFECT
    yield from without_effect(case, INERT)
    yield from without_effect(case, ASKED, departures)
    yield from without_effect(case, OF_EXPERTS, departures if EXPERTS in departures else SETTINGS)


def settings_go_together(case: Case) -> Iterator[Found]:
    yield from ((True, " ".join(names), sentence) for names, sentence in clashes(case.derived))
    alone = case.config.train.cuda_graph and case.world_size > 1
    yield alone, "cuda_graph", f"is for one process, not {case.world_size}: hosts start what ranks exchange"


def heads_and_positions_fit(case: Case) -> Iterator[Found]:
    model, derived, scaling = case.config.model, case.derived.model, _scaling(case)
    learned = model.position == "learned" and case.config.train.seq_length > derived.max_positions
    splits = model.head_size or model.hidden_size % model.num_attention_heads == 0
    odd = splits and model.position == "rope" and derived.head_size % 2
    yield not splits, "hidden_size num_attention_heads head_size", "not a multiple of {1}"
    yield odd, "head_size position model.hidden_size", "must be even with {1}"
    yield learned, "seq_length max_positions position", "longer than the table of learned positions, {1}"
    apart = (model.mup_base_width or model.hidden_size) * derived.num_key_value_heads % model.hidden_size
    rule = "heads grow with the width, and {2} with {1} are no whole number of them at the base"
    yield apart, "mup_base_width model.hidden_size num_key_value_heads", rule
    bare = scaling in ("llama3", "yarn") and model.rope_original_positions is None
    yield bare, "rope_original_positions rope_scaling", "must be set with {1}, to the context length before scaling"
    yield scaling == "yarn" and model.rope_theta <= 1, "rope_theta rope_scaling", "must be above 1 with {1}"
    scales = (model.rope_mscale, model.rope_mscale_all_dim)
    twice = scales.count(None) == 1 or (model.rope_attention_factor is not None and scales != (None, None))
    names = "rope_mscale rope_mscale_all_dim rope_attention_factor"
    yield scaling == "yarn" and twice, names, "the factor is given by this together with {1}, or by {2} alone"


def _scaling(case: Case) -> str | None:
    """How rotary positions are scaled; None where they are not."""
    model = case.config.model
    return model.rope_scaling if model.position == "rope" and model.rope_scaling_factor > 1 else None


def experts_are_chosen_and_placed(case: Case) -> Iterator[Found]:
    model, axes, moe = case.derived.model, case.derived.parallel, case.config.model.moe
    experts, k, groups, chosen = moe.num_experts, moe.top_k, moe.num_groups, moe.top_k_groups
    yield not experts and axes.etp != axes.tp, "etp num_experts tp", NO_EFFECT
    if not experts:
        moe_outputs = "moe" in case.config.train.recompute_modules
        yield moe_outputs, "recompute_modules num_experts", "moe has no effect with {1}"
        return
    learns = k > 1 or case.config.checkpoint.init_from is not None
    after = moe.score == "softmax" and not moe.pre_softmax  # the choice: over the chosen experts alone
    few = chosen <= groups and experts // groups * chosen < k <= experts
    dropped = moe.capacity_factor is not None and moe.capacity_factor * k < 1
    yield few, "top_k top_k_groups num_groups num_experts", "above the experts of a token's groups ({1}, {2}, {3})"
    yield dropped, "capacity_factor top_k", "with {1} all experts together take fewer than one choice of each token"
    yield after and not learns, "top_k pre_softmax score", "a softmax over one expert is 1 and learns nothing ({1})"
    sums = "the softmax over the chosen experts has the sum 1 as it is ({1})"
    yield after and not moe.normalize_weights, "normalize_weights pre_softmax score", sums
    names = "first_dense_layers layer_freq" if moe.first_dense_layers else "layer_freq first_dense_layers"
    alone = model.num_layers - moe.first_dense_layers < moe.layer_freq
    yield alone, f"{names} num_layers", "leaves no layer with experts, or one alone ({1}, {2})"
    uneven = model.moe.ffn_hidden_size * moe.num_shared_experts % axes.tp
    yield uneven, "moe.ffn_hidden_size num_shared_experts tp", "with {1} not a multiple of {2}"
    apart = axes.tp > 1 and not axes.sequence_parallel
    yield apart, "sequence_parallel tp", "experts need it with {1}: each rank routes its own part of the sequence"


def names_are_file_names(case: Case) -> Iterator[Found]:
    for name, pattern in (("model.name", MODEL_NAME), ("run_name", NAME)):
        value = case.given(name)
        yield value is not None and not pattern.fullmatch(value), name, f"must match {pattern.pattern}"


def kernels_can_run(case: Case) -> Iterator[Found]:
    """A fp8 product takes weights of which both sizes are multiples of 16, on each rank of tp."""
    config, model, tp = case.config, case.derived.model, case.config.parallel.tp
    tiles = config.train.attention != "auto" and config.parallel.cp > 1 and layout.exchange_of(config).ring > 1
    yield tiles, "attention cp_comm cp", "has no effect with {1}, whose ranks compute tiles of their own"
    if config.train.fp8 is None:
        return
    yield model.num_layers < 3, "fp8 num_layers", "the first and last block stay in bf16: no others with {1}"
    heads, groups, d = model.num_attention_heads, model.num_key_value_heads, model.head_size
    inner = 0 if all(map(model.has_experts, range(1, model.num_layers - 1))) else model.ffn_hidden_size
    inputs, outputs = heads // tp * d, (heads // tp + 2 * max(1, groups // tp)) * d
    unfit = [size for size in (model.hidden_size, inputs, outputs, inner // tp) if size % 16]
    rule = f"takes sizes that are multiples of 16, and on a rank of {{1}} these are not: {unfit}"
    splits = heads % tp == inner % tp == 0  # else another rule says so
    uneven = config.train.fp8_weight_gradients and config.train.seq_length // config.parallel.cp % 16
    yield uneven, "fp8_weight_gradients seq_length cp", "takes ranks with a multiple of 16 tokens, not {1} over {2}"
    yield unfit and splits, f"fp8 tp head_size model.hidden_size model.ffn_hidden_size {16 * heads} {16 * tp}", rule


def numbers_are_held_as_asked(case: Case) -> Iterator[Found]:
    """fp32 rounds no number to nothing or out of bounds. A precision of auto is judged where the device has chosen."""
    config, optimizer, betas = case.config, case.config.optimizer, case.config.optimizer.betas
    small = optimizer.moment_dtype == "bf16" and betas and 1 - 2**-8 <= betas[0] < 1  # half an ulp of bf16
    yield len(betas) != 2, "betas", "must be two numbers"
    yield small, "moment_dtype betas", "with {1} a step takes less of the first moment than bf16 rounds away"
    for setting in ROUNDED if config.precision != "fp64" else ():
        value = case.given(setting.name)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        held = ((one, c_float(one).value) for one in numbers)
        lost = [there for one, there in held if (one and not there) or outside(setting, there)]
        yield lost, f"{setting.name} precision", f"fp32 holds it as {lost[:1]}, and the precision is {config.precision}"


def data_suits_its_source(case: Case) -> Iterator[Found]:
    data, shares = case.config.data, case.config.data.weights or []
    parts = data.path if isinstance(data.path, list) else [data.path]
    none, stdlib = data.path in (None, []), data.source == "stdlib"
    unusable = not none and not all(type(part) in (str, int) and str(part).strip() for part in parts)
    uneven = shares and not 1 < len(shares) == len(parts)
    yield stdlib and not none, "data.path data.source", f"{NO_EFFECT}, Python's own source: data=text for files"
    yield stdlib and data.validation, "data.validation data.source", "sets are of files: data=text, hf or tokens"
    yield not stdlib and none, "data.path", f"data={data.source} must be told what to read"
    yield not stdlib and unusable, "data.path", "must be text or a list of texts"
    yield uneven, "data.weights", f"must be as many as data.path has parts, {len(parts)}, and at least two"


def vocabulary_holds_the_tokens(case: Case) -> Iterator[Found]:
    config, size = case.config, case.config.model.vocab_size
    made = {"bpe": config.data.bpe_vocab_size, "byte": 257}.get(config.tokenizer, 0)
    if config.data.source != "tokens" and size is not None and size < made:
        weights, name = config.checkpoint.init_from, "bpe_vocab_size" if config.tokenizer == "bpe" else "tokenizer"
        rule = f"has {made} tokens, and the weights know {size}: tokenizer={weights}"
        yield weights is not None, f"tokenizer {name}", rule
        yield weights is None, f"model.vocab_size {name}", f"below the {made} tokens of the tokenizer ({{1}})"


def axes_have_places(case: Case) -> Iterator[Found]:
    """Activations flow along one pipeline, so dense layers and experts must agree which stages are neighbours."""
    axes, sizes = case.config.parallel, layout.axis_sizes(case.config, case.world_size)
    named = axes.order.split("-")
    yield axes.vpp > 1 and axes.pp == 1, "vpp pp", "virtual stages divide the stages of a pipeline, and {1} has none"
    if sorted(named) != sorted({*named} & {*layout.AXES}):
        yield True, "order", f"must name axes of {', '.join(layout.AXES)}, in lower case and none twice"
        return
    large = [axis for axis in layout.AXES if max(sizes[axis], sizes[EXPERT_NAME.get(axis, axis)]) > 1]
    missing = [axis for axis in large if axis not in named]
    yield missing, "order", f"has no place for {', '.join(missing)} of sizes above 1"
    if axes.pp > 1 and routes(case) and case.world_size % layout.least_world(case.config) == 0 and not missing:
        dense, expert = (strides_of(axes.order, sizes, known)["pp"] for known in (DENSE_AXES, EXPERT_AXES))
        rule = f"neighbouring stages are {dense} ranks apart for dense layers, {expert} for experts"
        yield dense != expert, "order", rule


def stages_hold_all_layers(case: Case) -> Iterator[Found]:
    """Settings that place the same layers clash; the others must place each layer once."""
    settings = layout.stage_settings(case.config, case.split_rank)
    names = {**layout.STAGE_NAMES, "split_rank": "split_rank"}
    for clashing, others in settings.clashes.items():
        shown = " and ".join(case.show(names[other]) for other in others)
        yield True, " ".join(names[one] for one in (clashing, *others)), f"cannot be combined with {shown}"
    if settings.clashes or (settings.vpp > 1 and settings.pp == 1):  # another rule says so
        return
    try:
        stage_counts(settings)
    except ValueError as error:
        refused = "model.num_layers" if settings.layout is None else "parallel.pipeline_layout"
        asked = [names[name] for name in settings.asked]
        shown = ", ".join(case.show(name) for name in dict.fromkeys(("parallel.pp", *asked)) if name != refused)
        tried = dict.fromkeys((refused, "model.num_layers", *asked, "parallel.pp", "parallel.vpp"))
        yield True, " ".join(tried), f"{error} ({shown})"


def batches_suit_ranks_and_schedule(case: Case) -> Iterator[Found]:
    """The full batch does, and if it does, all smaller ones of a ramp."""
    train, request = case.config.train, schedule_request(case.config, case.world_size)
    dp, rest = divmod(case.world_size, layout.dense_ranks(case.config))
    unit, sizes, flaw = (train.micro_batch_size or 1) * max(1, dp), batch_sizes(train), ramp_flaw(train)
    uneven = next((size for size in sizes if size % unit), 0)
    full, flaws = not rest and sizes[-1] % unit, [*schedule_flaws(request)]
    rule = f"not a multiple of {unit}, a micro-batch for each data-parallel rank"
    yield full, f"global_batch_size micro_batch_size world_size {unit}", rule
    for name, rule in flaws:
        yield True, " ".join(dict.fromkeys((name, "parallel.schedule", "parallel.vpp", "parallel.pp"))), rule
    yield flaw, "batch_ramp", str(flaw)
    if rest or full or flaws:
        return
    yield uneven, "batch_ramp", f"has batches of {uneven} sequences, and all ranks take multiples of {unit}"
    ramps = () if uneven else (size * request.microbatches // sizes[-1] for size in sizes[:-1])
    short = ((many, rule) for many in ramps for _, rule in schedule_flaws(replace(request, microbatches=many)))
    for many, rule in islice(short, 1):
        yield True, "batch_ramp", f"has batches of {many} microbatches: {rule}"


def schedule_flaws(request: ScheduleRequest) -> Iterator[tuple[str, str]]:
    """Everything that keeps the request from being a schedule: the setting, and the rule that it breaks."""
    name, pp, microbatches, group = request.schedule, request.pp, request.microbatches, request.group_size
    chunked = name in CHUNKED
    if chunked != (request.vpp > 1):
        rule = "takes several chunks" if chunked else "takes one chunk"
        yield "parallel.schedule", f"{name} {rule} of layers for each rank, not parallel.vpp={request.vpp}"
    if group is not None and not chunked:
        yield "parallel.microbatch_group_size", f"has no effect with parallel.schedule={name}"
    if chunked and microbatches < pp:
        rule = f"{name} needs a microbatch for each of parallel.pp={pp} ranks, and there are {microbatches}"
        yield "train.global_batch_size", rule
    elif chunked and group is not None and (not pp <= group <= microbatches or 0 < microbatches % group < pp):
        rule = f"must be from parallel.pp={pp} to {microbatches}, the microbatches, and leave none or {pp} for the last"
        yield "parallel.microbatch_group_size", rule


def ranks_hold_equal_shares(case: Case) -> Iterator[Found]:
    """Layers are cut over tp, key-value heads cut or copied; the optimizer's instances divide its replicas."""
    config, model, tp = case.config, case.derived.model, case.config.parallel.tp
    heads, groups, world = model.num_attention_heads, model.num_key_value_heads, case.world_size
    apart = heads % groups == 0 and groups != heads and groups % tp and tp % groups
    yield apart, "num_key_value_heads tp num_attention_heads", "neither a multiple nor a divisor of {1}"
    mlp = len(model.expert_layers) < model.num_layers
    yield mlp and model.ffn_hidden_size % tp, "model.ffn_hidden_size tp", "not a multiple of {1}"
    sizes = layout.axis_sizes(config, world)
    replicas = [("dp x cp", sizes["dp"] * sizes["cp"], layout.dense_ranks(config))]
    replicas += [("edp", sizes["edp"], layout.least_world(config))] if routes(case) else []
    for name, ranks, unit in replicas if config.optimizer.zero else ():
        rest = world % unit == 0 and ranks % config.optimizer.instances
        yield rest, f"instances tp pp {ranks}", f"does not divide {name} = {ranks}"


def context_ranks_can_exchange(case: Case) -> Iterator[Found]:
    """Pieces of a sequence are equal, a ring's fill a block, and heads divide over ranks that swap them."""
    config, axes, exchange = case.config, case.derived.parallel, layout.exchange_of(case.config)
    (heads, groups), cp, kind, size = layout.local_heads(config), axes.cp, axes.cp_comm, axes.cp_alltoall
    pieces = (axes.tp if axes.sequence_parallel else 1) * (1 if cp == 1 else 2 * cp)
    rule = f"not a multiple of {pieces}, its pieces with {{1}} and {{2}}"
    yield config.train.seq_length % pieces, f"seq_length cp tp sequence_parallel {pieces}", rule
    if cp == 1:  # other rules say that the settings have no effect
        return
    have, both = f"the {heads} query and {groups} key-value heads of a rank", kind == "alltoall+ring"
    divides = layout.exchanges_heads(config, exchange.alltoall)
    product = 1 < exchange.alltoall < cp and cp % exchange.alltoall == 0
    swap, refused = exchange.alltoall == cp and not both, "attention_dropout cp" if kind == "auto" else "cp_comm cp"
    yield swap and not divides, refused, f"an exchange of heads is needed, and {have} do not divide over {{1}}"
    rule = f"{{1}} must be a product of two sizes above 1, over the first of which divide {have}"
    yield both and not (product and divides), "cp_alltoall cp cp_comm" if size else "cp_comm cp", rule
    tokens, rest = divmod(config.train.seq_length, 2 * exchange.ring)
    rule = f"leaves {{1}} pieces of {tokens} tokens, shorter than a block of {BLOCK}"
    yield exchange.ring > 1 and not rest and tokens < BLOCK, f"seq_length cp cp_comm {2 * exchange.ring * BLOCK}", rule
    rule = "with {1} no rank has whole rows of probabilities to drop from"
    yield case.derived.model.attention_dropout and exchange.ring > 1, "attention_dropout cp_comm cp", rule


LAYOUT_RULES: tuple[Rule, ...] = (
    axes_have_places,
    ("world_size", "not a multiple of", "tp cp pp"),
    ("world_size", "not a multiple of", "etp ep pp", routes),
)
EXPERT_RULES: tuple[Rule, ...] = (("num_experts", "not a multiple of", "ep"),)
STAGE_RULES: tuple[Rule, ...] = (stages_hold_all_layers,)
SCHEDULE_RULES: tuple[Rule, ...] = (batches_suit_ranks_and_schedule,)
RULES: tuple[Rule, ...] = (
    ("layer_norms_interval", "not a multiple of", "log_interval"),
    ("num_key_value_heads", "does not divide", "num_attention_heads"),
    ("rope_high_frequency_factor", "not above", "rope_low_frequency_factor", lambda case: _scaling(case) == "llama3"),
    ("rope_beta_fast", "not above", "rope_beta_slow", lambda case: _scaling(case) == "yarn"),
    ("num_experts", "not a multiple of", "num_groups", routes),
    ("top_k_groups", "above", "num_groups", routes),
    ("top_k", "above", "num_experts", routes),
    ("top_k", "not a multiple of", "top_k_groups", routes),
    ("moe.ffn_hidden_size", "not a multiple of", "etp", routes),
    ("recompute_layers", "above", "num_layers"),
    ("min_lr", "above", "optimizer.lr", warms_up),
    ("min_loss_scale", "above", "initial_loss_scale", lambda case: case.config.precision == "fp16"),
    ("num_attention_heads", "not a multiple of", "tp"),
    ("vocab_multiple", "below", "tp"),  # a small vocabulary, padded to it, might leave a rank without rows
    *(*LAYOUT_RULES, *EXPERT_RULES, *STAGE_RULES, *SCHEDULE_RULES),
    *(heads_and_positions_fit, experts_are_chosen_and_placed, ranks_hold_equal_shares, context_ranks_can_exchange),
    *(settings_have_an_effect, settings_go_together, kernels_can_run, a_run_has_one_length, *LENGTH_RULES),
    *(names_are_file_names, numbers_are_held_as_asked, data_suits_its_source, vocabulary_holds_the_tokens),
)
