"""Overrides and config files, as Hydra reads them.

Hydra would stop at the first override that is wrong. Here each is read by itself, and refused with what would work.
What looks like a secret is refused, because command lines and saved configs are read by others.
"""

import re
import shlex
import sys
import typing
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megalite.config.files import read_yaml, refusing
from megalite.config.numbers import whole_number
from megalite.config.rule import outside
from megalite.config.settings import DERIVED, EXPERIMENT, GROUPS, SETTINGS, Setting, leaves, yaml_value
from megalite.errors.problems import NO_VALUE, Problem, UserError, shortened

PACKAGE = Path(__file__).resolve().parents[1]
CONF = folder if (folder := PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # of a wheel; of a checkout
MEND = "mend the file, or choose another; see docs/configuration.md"
PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)\Z)[a-z_/][\w./-]*", re.ASCII | re.IGNORECASE)  # a text everywhere
_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}  # Hydra 1.4 warns of it

# Named by conf/config.yaml and copies of it; what is no setting is refused here.
ConfigStore.instance().store(name="megalite_schema", node={})

ADVICE = "pass secrets in the environment (HF_TOKEN, WANDB_API_KEY), and change one that was typed: logs keep commands"
# In a name of small letters. Short words count where a word of the name ends in them: APIKEY and PGPASS, not KEYBOARD.
_SECRET_NAME = re.compile(r"token|secret|passw|passphrase|credential|(?:key|pass|pwd|auth|bearer|cookie)s?(?![a-z])")
_HARMLESS = re.compile(r"tokeni[sz][a-z]*|tokens|key_value|^(?:old)?pwd$|compass")
SECRET_VALUE = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|(?:gh[pousr]_|github_pat_|glpat-|wandb_v\d_)[\w-]{16,}"
    r"|sk-(?:(?:proj|ant|or|svcacct)-[\w-]{20,}|[A-Za-z0-9]{20,})"  # OpenAI and others
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"  # Slack, AWS, Google
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,})"  # JSON web token
    r"|://[^/\s:@]+:[^/\s@]+@"  # user:password in an address
    r"|hooks\.slack\.com/\w|discord(?:app)?\.com/api/webhooks/|\.webhook\.office\.com/"  # addresses of webhooks
    r"|(?:^|[=\[,:\s'\"])[0-9a-fA-F]{40}(?:$|[\],\s'\"}])"  # W&B, old form
)
FOREIGN_WORDS = {  # what the same is called in nanoGPT, Megatron-LM and transformers
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "optimizer.clip_grad": "grad_clip",
    "optimizer.zero": "use_distributed_optimizer zero_stage",
    "optimizer.initial_loss_scale": "loss_scale",
    "train.steps": "max_iters train_iters max_steps",
    "train.tokens": "train_tokens total_tokens max_tokens",
    "train.epochs": "num_train_epochs num_epochs",
    "train.global_batch_size": "batch_size",
    "train.seq_length": "block_size sequence_length",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.num_attention_heads": "n_head",
    "model.hidden_size": "n_embd",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "model.moe.num_experts": "num_moe_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "moe_router_topk num_experts_per_tok",
    "model.moe.ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size",
    "model.moe.aux_loss_coeff": "router_aux_loss_coef",
    "precision": "dtype",
    "run_dir": "output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
YES, NO = ("true", "yes", "y", "on", "1"), ("false", "no", "n", "off", "0")


class Files(NamedTuple):
    """Folders like conf/, of which the first that has a file counts, and the name of the config to begin with.
    `recipe`: the config.yaml of a run, whose settings come on top."""

    folders: tuple[str, ...]
    name: str
    recipe: Path | None = None


class _OwnFolders(SearchPathPlugin):
    """Puts the folders of the user before the main one, which is the last."""

    folders: ClassVar[Sequence[str]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.prepend("own", f"file://{folder}", anchor="main")


def _main_folder(files: Files) -> str:
    """Hydra's main folder, when it knows all others."""
    *_OwnFolders.folders, main = files.folders
    Plugins.instance().register(_OwnFolders)
    return main


def files_of(arguments: Namespace) -> Files:
    """The files that a command line asks for."""
    name, main = (arguments.config_name or "config").removesuffix(".yaml"), arguments.config_path or str(CONF)
    files = Files((arguments.config_dir, main) if arguments.config_dir else (main,), name)
    chosen = next((path for folder in files.folders if (path := Path(folder, f"{name}.yaml")).exists()), None)
    with suppress(UserError):  # refused by whoever composes the file
        if chosen is not None and chosen.parent != CONF and DERIVED in read_yaml(chosen):
            others = [folder for folder in files.folders if folder not in (str(chosen.parent), str(CONF))]
            return Files((*others, str(CONF)), "config", chosen)
    return files


def hydra_with(files: Files) -> AbstractContextManager[Any]:
    """Hydra, initialized with the files for the time of a block; a sweep has done it already."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return hydra.initialize_config_dir(_main_folder(files), "pretrain_gpt", **_VERSION_BASE)


def composed(files: Files, choices: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the files of the command's choices, by dotted names, before interpolations are resolved.
    UserError for a file that cannot be read."""
    words = [f"{group}={choice}" for group, choice in choices.items()]
    with refusing(" ".join([f"--config-name={files.name}", *words]), MEND):
        try:
            with hydra_with(files):
                found = hydra.compose(files.name, words)
            return leaves(cast(dict[str, Any], OmegaConf.to_container(found)))
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(in_one_line(error)) from error


def run_hydra(words: Sequence[str], function: Callable[[Any], Any], files: Files) -> int:
    """Lets Hydra itself read a command line, and call the function if that is for it; the exit status."""
    given, sys.argv[1:] = sys.argv[1:], [*words]
    try:
        hydra.main(config_path=_main_folder(files), config_name=files.name, **_VERSION_BASE)(function)()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv[1:] = given
    return 0


def in_one_line(error: Exception) -> str:
    """The message of an error of Hydra or OmegaConf, without the notes on where it has searched."""
    said = (str(error) or str(error.__cause__)).partition("\n    full_key")[0].partition("Config search path")[0]
    return shortened(" ".join(said.split()) or type(error).__name__)


def read_override(text: str, files: Files) -> tuple[dict[str, str], dict[str, Any]]:
    """The choices of files by group, and the values of settings by name, that an override means to Hydra; UserError
    where it is none, or an unknown choice."""
    text = text.lstrip("+")
    name, equals, given = text.partition("=")
    if secret_override(text):
        raise UserError(secret_problem(name if equals and not SECRET_VALUE.search(name) else "override"))
    if not equals or name.startswith(("-", "~", "hydra.", "hydra/")):
        hint = f"settings are written name=value: {nearest_setting(name.strip('-~')) or 'model'}=VALUE; see --help"
        if equals and name.startswith("hydra"):
            hint = "run_dir=FOLDER for a run; hydra.sweep, hydra/sweeper and hydra/launcher count with --multirun"
        raise UserError(Problem(shortened(name), given or NO_VALUE, "is no setting", hint))
    try:
        parsed = OverridesParser.create().parse_override(text)
        several = parsed.is_sweep_override()
        OmegaConf.create([None if several else parsed.value()])  # `${` and no end of it
    except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:  # too many digits or brackets
        hint = "quotes around texts with signs or blanks: 'NAME=\"a=b\"', in a list 'NAME=[\"a b\"]'"
        raise UserError(Problem(name, shortened(given), f"cannot be read ({in_one_line(error)})", hint)) from error
    if several:
        hint = f"{name}=[{given}] for a list, --multirun for a run per value"
        raise UserError(Problem(name, given, "several values", hint))
    name, value = parsed.get_key_element(), parsed.value()
    if isinstance(value, dict) and name not in SETTINGS:  # model={norm: rmsnorm} sets what model.norm=rmsnorm sets
        return {}, leaves(value, f"{name}.")
    found = (path.stem for folder in files.folders for path in Path(folder, name).glob("*.yaml"))
    if "." in name or not (choices := sorted({*found})):
        return {}, {name: value}
    if value not in choices:
        meant = [f"{one.name}={value}" for one in SETTINGS.values() if one.leaf == name and takes(one, value)]
        near = next(iter(get_close_matches(str(value), choices, n=1, cutoff=0.3)), None)
        hint = (meant or [f"{name}={near} is the nearest" if near else f"{name}={choices[0]}"])[0]
        rule = f"unknown choice: there is no conf/{name}/{value}.yaml"
        raise UserError(Problem(name, value, rule, f"{hint}; choices: {', '.join(choices)}"))
    return {name: str(value)}, {}


def of_type(setting: Setting, value: Any) -> Any:
    """A value from YAML or a command line as the setting's type; ValueError or OverflowError for another type."""
    several = typing.get_origin(setting.kind) is list
    if setting.nullable and (value is None or (value == "auto" and setting.kind is bool)):
        return None
    if several != isinstance(value, list) and setting.kind is not Any:
        raise ValueError(value)
    kind = typing.get_args(setting.kind)[0] if several else setting.kind
    return [_single(kind, one) for one in value] if isinstance(value, list) else _single(kind, value)


def _single(kind: Any, value: Any) -> Any:
    if kind is bool and (word := str(value).lower()) in (*YES, *NO):
        return word in YES
    others: dict[Any, tuple[type, ...]] = {bool: (object,), int: (bool,), float: (bool,)}
    if typing.get_origin(kind) is list and isinstance(value, list):
        return [_single(typing.get_args(kind)[0], one) for one in value]
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        return {key: float(one) if type(one) is int else one for key, one in value.items()}
    if value is None or isinstance(value, (list, dict, *others.get(kind, ()))) or typing.get_origin(kind):
        raise ValueError(value)
    return value if kind is Any else whole_number(value) if kind is int else kind(value)


def takes(setting: Setting, value: Any) -> bool:
    """Whether the value is of the setting's type and within its bounds."""
    try:
        return (one := of_type(setting, value)) is None or outside(setting, one) is None
    except (ValueError, OverflowError):
        return False


def as_override(value: Any) -> str:
    """The value as Hydra's command line reads it, so that it comes back as it is."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_override(one)}" for key, one in value.items()) + "}"
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return yaml_value(value)
    return QuotedString(value.replace("${", "\\${"), Quote.double).with_quotes()


def typed(name: str, value: Any) -> str:
    """NAME=VALUE as it is typed in a shell."""
    return shlex.quote(f"{name}={as_override(value)}")


def unknown(name: str, value: Any) -> Problem:
    """The problem with a name that is no setting, and what to write instead."""
    if secret_name(name) or SECRET_VALUE.search(str(value)):  # in a file
        return secret_problem(name)
    if name in GROUPS:
        return Problem(name, value, "is a group of settings", f"{name}=NAME of a file, or its settings: {name}.NAME")
    hint = "all settings are in docs/configuration.md"
    if near := nearest_setting(name):
        fits = near not in SETTINGS or takes(SETTINGS[near], value)
        hint = f"did you mean {typed(near, value) if fits else f'{near}: {SETTINGS[near].words}'} ?"
    return Problem(name, value, "unknown setting", hint)


def nearest_setting(name: str) -> str | None:
    """The setting or group that was most likely meant by a dotted name: by another project's word, or spelled alike."""
    leaf = name.rpartition(".")[2]

    def likeness(one: str) -> float:
        last = one.rpartition(".")[2]  # moe_layer_freq holds layer_freq
        return similarity(one, name) + (1 if last == leaf else 0.5 if len(last) > 4 and last in leaf else 0)

    if name in SETTINGS or name in GROUPS:
        return name
    known = SETTINGS if "." in name else (*SETTINGS, *GROUPS, EXPERIMENT)
    best = BY_WORD.get(leaf) or max(known, key=likeness)
    return best if leaf in BY_WORD or likeness(best) > 0.7 else None


def similarity(one: str, other: str) -> float:
    """1 for equal words, 0 for words that share nothing."""
    return SequenceMatcher(None, one.lower(), other.lower()).ratio()


def secret_problem(name: str) -> Problem:
    """The problem with a setting that holds a secret; its value is not shown."""
    return Problem(name, "(not shown)", "looks like a secret", ADVICE)


def secret_name(name: str) -> bool:
    """Whether a setting of this name would hold a secret. Known settings and slips of them never do."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.lstrip("+~-")).lower()  # accessKeyId
    leaf = name.rpartition(".")[2]
    return bool(_SECRET_NAME.search(_HARMLESS.sub("", words))) and all(
        similarity(leaf, setting.leaf) < 0.85 for setting in SETTINGS.values()
    )


def secret_override(text: str) -> bool:
    """Whether `name=value`, in any form, names or holds a secret; names inside `{name: value}` count too."""
    name, _, value = text.partition("=")
    names = re.findall(r"(?<![\w.-])([\w.-]+)\s*:", value.partition("{")[2])
    return bool(SECRET_VALUE.search(text)) or any(map(secret_name, (name, *names)))
