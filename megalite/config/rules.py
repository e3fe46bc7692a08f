"""Every rule that a config must keep; `bounds.py` has those of single settings, `model_rules.py` those
of the model alone, `parallel_rules.py` those that join settings with the ranks, `optimizer_rules.py` those of gradients
and the optimizer's state, `step_rules.py` those of single steps, `log_rules.py` those of wandb and TensorBoard; here
are all others.

Each rule is a small generator of `Problem`s that names the settings it read, with their numbers, and values that would
work. A rule whose text names a setting that is already refused stays silent: it would judge a value nobody asked for.
"""

import re
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megalite.config.bounds import bounds, with_defaults
from megalite.config.case import Case
from megalite.config.derive import BUILT_IN_TOKENIZERS, absolute, looks_like_path, run_dir_of
from megalite.config.log_rules import LOG_RULES
from megalite.config.model_rules import MODEL_RULES
from megalite.config.nccl_options import read_nccl_options
from megalite.config.optimizer_rules import OPTIMIZER_RULES
from megalite.config.parallel_rules import PARALLEL_RULES
from megalite.config.remedies import problems_of
from megalite.config.run_dir import run_dir_problems
from megalite.config.run_names import NAME
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, yaml_value
from megalite.config.step_rules import STEP_RULES
from megalite.errors.problems import Problem, collect
from megalite.errors.remedies import nearest
from megalite.layout.flaws import Flaw

Rule = Callable[[Config, int], Iterator[Problem]]

OLDEST_TORCH = (2, 11)  # as in pyproject.toml
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check(config: Config, world_size: int, doubtful: Collection[str] = ()) -> list[Problem]:
    """All problems of a config on `world_size` ranks. `doubtful` settings were refused before they entered it."""
    problems = list(bounds(config))
    refused = set(doubtful) | {problem.setting for problem in problems}
    judged = with_defaults(config, {problem.setting for problem in problems})
    found = (problem for rule in RULES for problem in rule(judged, world_size))
    return problems + [problem for problem in found if not any(_names(problem, name) for name in refused)]


def _names(problem: Problem, name: str) -> bool:
    """Whether a problem speaks of the setting, or of any setting of the group, called `name`."""
    return bool(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", f"{problem.setting} {problem.rule}"))


# --- training ------------------------------------------------------------------------------------------------------


def recompute_has_an_effect(config: Config, world_size: int) -> Iterator[Problem]:
    """What is asked for is done: the modules under selective, the layers under full. The defaults ask for nothing."""
    kind, layers, modules = config.train.recompute, config.train.recompute_layers, config.train.recompute_modules
    there = config.model.num_layers
    once = list(dict.fromkeys(modules))
    if kind == "selective" and not modules:
        remedy = "train.recompute=none, or train.recompute_modules=[attention]"
        yield Problem("train.recompute_modules", modules, "train.recompute=selective needs some", remedy)
    if len(once) < len(modules):
        remedy = f"train.recompute_modules={yaml_value(once)}"
        yield Problem("train.recompute_modules", modules, "names one more than once", remedy)
    if kind != "selective" and once and once != SETTINGS["train.recompute_modules"].default:
        rule = f"has no effect with train.recompute={kind}"
        yield Problem("train.recompute_modules", modules, rule, "train.recompute=selective, or leave it out")
    if layers is not None and kind != "full":
        rule = f"has no effect with train.recompute={kind}"
        yield Problem("train.recompute_layers", layers, rule, "train.recompute=full, or leave it out")
    elif layers is not None and layers > there:
        remedy = f"train.recompute_layers={there} or less, or leave it out: all"
        yield Problem("train.recompute_layers", layers, f"more than model.num_layers={there}", remedy)


def schedule_fits_the_steps(config: Config, world_size: int) -> Iterator[Problem]:
    steps, warmup, decay = config.train.steps, config.lr.warmup_steps, config.lr.decay_steps
    if warmup is not None and warmup > steps:
        yield Problem(
            "lr.warmup_steps",
            warmup,
            f"the warm-up is longer than the run, train.steps={steps}",
            f"lr.warmup_steps={min(100, steps // 10)} (the default for this run), or train.steps={warmup} or more",
        )
    elif config.lr.schedule == "wsd" and decay is not None and (warmup or 0) + decay > steps:
        yield Problem(
            "lr.decay_steps",
            decay,
            f"with lr.warmup_steps={warmup or 0} it is longer than the run, train.steps={steps}",
            f"lr.decay_steps={min(steps // 5, steps - (warmup or 0))}, or train.steps={(warmup or 0) + decay} or more",
        )


def learning_rate_falls(config: Config, world_size: int) -> Iterator[Problem]:
    peak, end = config.optimizer.lr, config.lr.min_lr
    if end is not None and end > peak:
        yield Problem(
            "lr.min_lr",
            end,
            f"above the peak, optimizer.lr={peak:g}",
            f"lr.min_lr={peak / 10:g}, or a larger optimizer.lr",
        )


def betas_are_two_decay_rates(config: Config, world_size: int) -> Iterator[Problem]:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.betas", betas, "must be two numbers, each at least 0 and below 1", "optimizer.betas=[0.9,0.95]"
        )


# --- data and tokenizer --------------------------------------------------------------------------------------------


def data_path_suits_the_source(config: Config, world_size: int) -> Iterator[Problem]:
    source, path = config.data.source, config.data.path
    examples = {"text": "data.path=book.txt", "hf": "data.path=roneneldan/TinyStories", "tokens": "data.path=corpus"}
    parts = path if isinstance(path, list) else [path]
    if source == "stdlib":
        if path is not None:
            yield Problem(
                "data.path", path, "data=stdlib reads Python's own source and takes no path", "data=text for files"
            )
    elif path is None or path == []:
        yield Problem("data.path", path, f"data={source} needs to be told what to read", examples[source])
    elif not all(isinstance(part, str | int) and not isinstance(part, bool) and str(part).strip() for part in parts):
        yield Problem(
            "data.path", path, "must be text or a list of texts", f"{examples[source]} or data.path=[one,two]"
        )


def weights_suit_the_blend(config: Config, world_size: int) -> Iterator[Problem]:
    weights, path = config.data.weights, config.data.path
    if weights is None:
        return
    parts = len(path) if isinstance(path, list) else 1
    if parts < 2:
        yield Problem("data.weights", weights, "only a data.path of several parts has shares", "leave data.weights out")
    elif len(weights) != parts:
        yield Problem(
            "data.weights",
            weights,
            f"{len(weights)} shares for the {parts} parts of data.path",
            f"{parts} numbers, one for each part, in the same order",
        )
    if any(weight <= 0 for weight in weights):
        remedy = "positive numbers like data.weights=[0.7,0.3]; leave out the path of a part that is not wanted"
        yield Problem("data.weights", weights, "shares must be above 0", remedy)


def vocabulary_holds_the_tokens(config: Config, world_size: int) -> Iterator[Problem]:
    size, trained = config.model.vocab_size, config.data.bpe_vocab_size
    if config.tokenizer == "bpe" and config.data.source != "tokens" and size is not None and size < trained:
        yield Problem(
            "model.vocab_size",
            size,
            f"smaller than the vocabulary that is trained on the data, data.bpe_vocab_size={trained}",
            f"model.vocab_size=null (the tokenizer's), or data.bpe_vocab_size={size}"
            + ("" if size >= 258 else " is below 258, so rather tokenizer=char"),
        )


def tokenizer_exists(config: Config, world_size: int) -> Iterator[Problem]:
    name = config.tokenizer
    folder = Path(absolute(name))
    near = nearest(name, BUILT_IN_TOKENIZERS)
    hint = f"tokenizer={near}, or " if near else ""
    if name in BUILT_IN_TOKENIZERS or (name and folder.is_dir()):
        return
    if looks_like_path(name):
        yield Problem(
            "tokenizer", name, f"there is no folder {folder}", "the folder of a transformers tokenizer", here=True
        )
    elif not HUB_NAME.fullmatch(name):
        yield Problem(
            "tokenizer",
            name,
            "neither built in, nor a folder, nor the form of a hub name",
            f"{hint}one of {', '.join(BUILT_IN_TOKENIZERS)}, a folder, or a name like gpt2 or owner/name",
        )


# --- folders -------------------------------------------------------------------------------------------------------


def start_weights_exist(config: Config, world_size: int) -> Iterator[Problem]:
    source = config.checkpoint.init_from
    if source is not None and not Path(absolute(source), "config.json").is_file():
        place = Path(absolute(source))
        remedy = "a folder written by transformers' save_pretrained, with config.json and model.safetensors"
        if place.is_file():
            rule = f"{place} is a file; a pickle (.pt, .bin) can run code, so none is ever loaded"
        elif not place.is_dir():
            rule = f"the folder {place} does not exist"
        elif any((place / name).exists() for name in ("run.json", "checkpoints")):
            rule = f"{place} is the folder of a run, not of a transformers model"
            remedy = f"scripts/export_hf.py {source} OUT and checkpoint.init_from=OUT; to continue it, run_dir={source}"
        else:
            rule = f"the folder {place} holds no config.json"
        yield Problem("checkpoint.init_from", source, rule, remedy, here=True)


def run_dir_is_not_read_as_data(config: Config, world_size: int) -> Iterator[Problem]:
    """A folder of text is read with all that is below it: what the run writes there would be other data next time."""
    path, folder = config.data.path, Path(absolute(config.run_dir or "runs"))
    if config.data.source not in ("text", "hf"):
        return
    for part in path if isinstance(path, list) else [path]:
        place = Path(absolute(str(part)))
        if place.is_dir() and folder.is_relative_to(place):
            rule = f"it is inside data.path={part}, a folder that is read whole: the run would change its own data"
            shown = config.run_dir or "null (runs/ in the folder of the command)"
            yield Problem("run_dir", shown, rule, "a run_dir elsewhere, or a glob like data.path='*.txt'", here=True)


def run_dir_can_be_used(config: Config, world_size: int) -> Iterator[Problem]:
    if config.run_name is not None and not NAME.fullmatch(config.run_name):
        rule = "must be a name that any file system takes: letters, digits and ._=+-, at most 100, no dot or sign first"
        yield Problem("run_name", config.run_name, rule, "run_name=baseline-1, or run_dir=PATH for a folder elsewhere")
    elif config.run_dir is not None:
        yield from run_dir_problems(config.run_dir, Path(absolute(config.run_dir)))
    elif config.run_name is not None:
        yield from run_dir_problems(f"null, run_name={config.run_name}", Path(run_dir_of(config)))


# --- ranks ---------------------------------------------------------------------------------------------------------


def settings_suit_the_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    """What is advised suits the model, too."""
    yield from problems_of(Case(config, world_size), PARALLEL_RULES, also=(model_flaws,))


def model_flaws(case: Case) -> Iterator[Flaw]:
    for rule in MODEL_RULES:
        for problem in rule(case.config, case.world_size):
            yield Flaw(problem.setting, rule.__name__, problem.rule, ())


def nccl_options_can_be_read(config: Config, world_size: int) -> Iterator[Problem]:
    problems: list[Problem] = []
    path = config.parallel.nccl_options
    if path is not None:
        collect(lambda: read_nccl_options(Path(absolute(path))), problems)
    yield from problems


# --- installation --------------------------------------------------------------------------------------------------


def torch_is_new_enough(config: Config, world_size: int) -> Iterator[Problem]:
    """pip sees to it, unless it was told not to. Asked without importing torch, which an old one would not survive."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # built in place: whoever does that knows what it is
        return
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        rule = f"older than {oldest}; before 2.10 a file that torch loads can run code (CVE-2026-24747)"
        yield Problem("torch", found, rule, f"pip install 'torch>={oldest}'", here=True)


RULES: tuple[Rule, ...] = (
    torch_is_new_enough,
    *MODEL_RULES,
    settings_suit_the_ranks,
    recompute_has_an_effect,
    schedule_fits_the_steps,
    learning_rate_falls,
    betas_are_two_decay_rates,
    nccl_options_can_be_read,
    *OPTIMIZER_RULES,
    *STEP_RULES,
    *LOG_RULES,
    data_path_suits_the_source,
    weights_suit_the_blend,
    vocabulary_holds_the_tokens,
    tokenizer_exists,
    start_weights_exist,
    run_dir_can_be_used,
    run_dir_is_not_read_as_data,
)
