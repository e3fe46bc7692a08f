"""A trained model on disk, opened for reading: a checkpoint of a run, in any layout, or a folder of transformers.

Reading takes no lock and renames nothing, so it may be done while the run goes on. In a folder of transformers
(hf/families/) only config.json and safetensors are read: no model of transformers is built, nothing is downloaded or
unpickled. What does not fit (another shape, missing or unexpected tensors) is refused, all of it in one message. A
dense file also makes a model with experts: the MLP is every expert, and there are no routers (arXiv 2212.05055).
"""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.commit import CHECKPOINTS
from megalite.checkpoint.manifest import Piece
from megalite.checkpoint.reading import Found, newest
from megalite.checkpoint.run_folder import TOKENIZER, check_tokenizer
from megalite.config.derive import derive_model
from megalite.config.files import RUN, read_object
from megalite.config.model_folder import (
    SETTING,
    folder_problem,
    holds_tokenizer,
    imported_model_settings,
    read_model_file,
)
from megalite.config.schema import Config, ModelConfig
from megalite.config.settings import SETTINGS, leaves, with_values, yaml_value
from megalite.data.tokenizers import TextTokenizer, load_tokenizer
from megalite.errors.problems import NO_VALUE, Problem, UserError, refuse, to_stderr
from megalite.hf.families import FAMILIES
from megalite.hf.families.family import Family, differences
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES, choose_device, choose_precision
from megalite.launch.process import ProcessEnvironment
from megalite.model.gpt import GPT, Routers
from megalite.model.init import fill
from megalite.model.parameters import gpt_parameters
from megalite.optim.buffers import EMA
from megalite.train.saving import SavedState, kind_of

LONGEST = 1024  # tokens in a sequence, where a model of others was made for more
HEAD = "lm_head.weight"
FLOATING = ("F64", "F32", "F16", "BF16")
NOT_WEIGHTS = re.compile(r"attn\.(masked_)?bias$|rotary_emb\.inv_freq$")  # buffers that older versions saved
MOST_NAMED = 20  # tensors that do not fit

Stored = dict[str, Any]  # by name in `sources`: the tensor in its open file, not read yet


@dataclass(frozen=True)
class SavedModel:
    """What is known of a model before its weights are read. `config` is that of the run; of a model of transformers it
    has the model, its precision (auto: unknown) and the length of a sequence to give it."""

    folder: Path
    config: Config
    tokenizer_folder: Path | None  # what its token ids mean, if that is known
    found: Found | None = None  # the verified checkpoint of a run
    state: SavedState | None = None
    ema: bool = False  # its weights are the averages of optimizer.ema_half_life_steps

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        return load_tokenizer(self.tokenizer_folder) if self.tokenizer_folder else None

    def known_tokenizer(self) -> TextTokenizer:
        """UserError where it is not known."""
        if self.tokenizer is None:
            rule = "the folder holds no tokenizer, so there is nothing to read text with"
            raise UserError(Problem("model", str(self.folder), rule, "put the tokenizer of its tokens there"))
        return self.tokenizer

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """(logical name, tensor of the logical shape) of all parameters, in the order of `gpt_parameters`: of a run the
        masters, or their averages. Names and shapes are checked now; a tensor is read when its turn comes, so that one
        is in memory."""
        if self.found is None:
            return import_model(self.folder, self.config.model)
        records, kind = gpt_parameters(self.config.model), EMA if self.ema else "master"
        return ((record.name, self.read(f"{kind}.{record.name}", record.shape)) for record in records)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the run's checkpoint, in the precision of the masters."""
        assert self.found is not None
        dtype = torch.float64 if DTYPES[self.config.precision] == torch.float64 else torch.float32
        value = torch.empty(shape, dtype=dtype)
        self.found.read_into([Piece(name, shape, (0,) * value.dim(), value)], unread=name.__ne__)
        return value

    def load(self, asked: Config) -> GPT:
        """The model with its weights, in evaluation mode, on the device that is asked for, and in its precision (auto:
        its own)."""
        values = self.values()  # refuses before there is memory for a model of any size that a file may tell
        device = choose_device(asked.device, ProcessEnvironment())
        dtype = choose_precision(self.config.precision if asked.precision == "auto" else asked.precision, device)
        train = replace(asked.train, compile=False, fp8=None)
        model = GPT(replace(asked, model=self.config.model, train=train), dtype=dtype, device=device)
        fill(model, values)
        for name, value in Routers([model]).state() if self.found else ():
            value.copy_(self.read(name, tuple(value.shape)))
        return model.eval()


def open_model(folder: Path, step: int | None = None, *, ema: bool = False) -> SavedModel:
    """The model of a run (its newest undamaged checkpoint, or that of `step`) or of transformers; with `ema` that of
    the averaged weights. UserError for what is neither, or does not fit."""
    if (folder / CHECKPOINTS).is_dir() or (folder / RUN).is_file():
        return _open_run(folder, step, ema)
    if not (folder / "config.json").is_file():
        rule = "must be the folder of a run or of a transformers model (config.json); models are not downloaded"
        remedy = "name a run folder, or one that save_pretrained has written"
        raise UserError(Problem("model", str(folder), rule, remedy))
    if step is not None:
        raise UserError(Problem("step", step, "a model of transformers has no steps", "leave it out"))
    if ema:
        rule = "a model of transformers has one set of weights, which may be averages: its model card says so"
        raise UserError(Problem("--ema", NO_VALUE, rule, "leave it out"))
    about = read_model_file(folder)
    lengths = [LONGEST, about.get("n_positions"), about.get("max_position_embeddings")]
    if (path := folder / "tokenizer_config.json").is_file():  # a table of positions may be longer than what was trained
        lengths.append(read_object(path).get("model_max_length"))
    length = min(length for length in lengths if isinstance(length, int) and length > 0)
    saved_in = f"torch.{about.get('dtype') or about.get('torch_dtype')}"
    precision = next((name for name, dtype in DTYPES.items() if str(dtype) == saved_in), "auto")
    told = {f"model.{name}": value for name, value in imported_model_settings(folder).items()}
    config = with_values(Config(), {**told, "precision": precision, "train.seq_length": length})
    config = replace(config, model=derive_model(config.model, length))
    return SavedModel(folder, config, folder if holds_tokenizer(folder) else None)


def _open_run(folder: Path, step: int | None, ema: bool) -> SavedModel:
    """Settings that the run's megalite did not have are at their defaults. Damaged checkpoints that are passed over are
    named on stderr."""
    found = newest(folder / CHECKPOINTS, ParallelContext(), to_stderr, step=step, look_only=True)
    if found is None:
        remedy = "name the folder of a training that has saved a checkpoint"
        raise UserError(Problem("model", str(folder), "it holds no checkpoint", remedy))
    state = SavedState.of(found)
    settings = leaves(state.config)
    if strange := sorted(name for name in settings.keys() - SETTINGS.keys() if name.startswith("model.")):
        rule = f"its model has settings that are not known here: {', '.join(strange)}"
        raise UserError(Problem("model", str(found.path), rule, "use the megalite that wrote it"))
    config = with_values(Config(), {name: value for name, value in settings.items() if name in SETTINGS})
    check_tokenizer(folder, state.tokenizer)
    if ema and EMA not in map(kind_of, found.manifest.tensors):
        rule = f"the checkpoint of step {found.manifest.step} has no averages of the weights"
        remedy = "leave it out, or train on with optimizer.ema_half_life_steps=100, for example"
        raise UserError(Problem("--ema", NO_VALUE, rule, remedy))
    return SavedModel(folder, config, folder / TOKENIZER if (folder / TOKENIZER).is_dir() else None, found, state, ema)


class Source(NamedTuple):
    """The tensors of a file that a logical parameter consists of. In a dense file, several experts are one tensor."""

    shape: tuple[int, ...]
    names: Sequence[str]
    parts: Callable[[Tensor], Sequence[Tensor]]  # views of the parameter, one for each name
    dims: int  # of a tensor in the file: 2, or 1 of norms and biases
    turned: bool  # the file has [in, out]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(part.shape) for name, part in self.split(torch.empty(self.shape, device="meta")).items()}

    def split(self, value: Tensor) -> dict[str, Tensor]:
        """The tensors of the file, by name; views where that is possible."""
        parts = [part.flatten(0, part.dim() - self.dims) for part in self.parts(value)]
        return {name: part.t() if self.turned else part for name, part in zip(self.names, parts, strict=True)}

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """The inverse of `split`, to the bit."""
        tensors = {name: read(name) for name in dict.fromkeys(self.names)}
        value = torch.zeros(self.shape, dtype=reduce(torch.promote_types, (each.dtype for each in tensors.values())))
        for name, part in zip(self.names, self.parts(value), strict=True):
            part.copy_((tensors[name].t() if self.turned else tensors[name]).reshape(part.shape))
        return value


def import_model(
    folder: str | Path, config: ModelConfig, names: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(logical name, tensor of the logical shape, in the dtype of the file) for every parameter of `config`, or for
    those of `names`. A dense model for a `config` with experts gives its MLP for each expert, and no router.

    All names and shapes are checked before the first is read; vocabulary rows that pad the table are zero.
    """
    folder = Path(folder)
    family, settings = FAMILIES[read_model_file(folder)["model_type"]], imported_model_settings(folder)
    config = replace(config, vocab_size=config.vocab_size or settings["vocab_size"])
    ours = leaves(asdict(config))
    others = differences(settings, ours)
    if config.moe.num_experts and not family.has_experts:  # the MLP is every expert, and experts have no biases
        experts = {"moe.ffn_hidden_size": settings["ffn_hidden_size"], "moe.num_shared_experts": 0}
        experts |= {"moe.num_experts": 0} if settings["bias"] else {}
        others |= {name: value for name, value in experts.items() if ours[name] != value}
    rule, fixes = f"is another in the model of {folder}", {name: yaml_value(value) for name, value in others.items()}
    refuse([Problem(f"model.{name}", ours[name], rule, f"model.{name}={value}") for name, value in fixes.items()])
    stored, wanted = _stored_tensors(folder, family.prefix), sources(family, config)
    refuse([*_misfits(folder, stored, wanted, ignored={HEAD} if config.tie_embeddings else set())][:MOST_NAMED])
    if config.tie_embeddings and HEAD in stored:  # transformers uses it, whatever config.json says
        own, head = (_tensor(folder, stored, name) for name in (*wanted["embedding.word.weight"].names, HEAD))
        if not torch.equal(own, head):
            rule = f"tie_word_embeddings=true, and {HEAD} is another matrix than the embedding"
            raise UserError(Problem(SETTING, str(folder), rule, "tie_word_embeddings=false in its config.json"))
    return (
        (name, source.join(partial(_tensor, folder, stored)))
        for name, source in wanted.items()
        if names is None or name in names
    )


def sources(family: Family, config: ModelConfig) -> dict[str, Source]:
    """The sources by logical name, in the order of `gpt_parameters`. `config` is resolved (no None left)."""
    found = dict[str, Source]()
    for record in gpt_parameters(config):
        layer = "".join(re.findall(r"\.(\d+)\.", record.name))
        module, _, kind = re.sub(r"\.\d+\.", ".N.", record.name).rpartition(".")
        modules = family.modules.get(module, ())
        if record.precision == "master" and not modules:
            continue  # a router, of a dense file
        names = [
            f"{family.prefix}{name.replace('N', layer).replace('E', str(expert))}.{kind}"
            for expert in range(config.moe.num_experts if ".experts." in module else 1)
            for name in modules
        ] or [HEAD]
        dims = 1 if kind == "bias" or module.endswith("norm") else 2
        turned = family.conv1d and dims == 2 and module.startswith("blocks.")
        found[record.name] = Source(record.shape, names, partial(_parts, family, config, module), dims, turned)
    return found


def _parts(family: Family, config: ModelConfig, module: str, value: Tensor) -> Sequence[Tensor]:
    """The parts of a parameter that are tensors of the file, as views."""
    if module in ("embedding.word", "head"):
        return [value[: config.vocab_size]]  # the rows that round ours up are zero
    if module.endswith(".qkv"):  # [groups, queries + 2, size, ...]
        each = value.split((value.shape[1] - 2, 1, 1), dim=1)
        return [value.transpose(0, 1)] if family.conv1d else each  # all queries, all keys, all values
    if module.endswith(("gate_up", "experts.down")):  # [2, ffn, ...], [experts, 2, ffn, h], [experts, h, ffn]
        return value.flatten(0, max(0, value.dim() - 3)).unbind()
    return [value]


def _stored_tensors(folder: Path, prefix: str) -> Stored:
    """Every tensor in the safetensors files of the folder. Old folders leave the prefix of the names out."""
    if (adapter := folder / "adapter_config.json").exists():
        rule = "an adapter beside the weights is not applied"
        raise UserError(Problem(SETTING, str(adapter), rule, "merge it (merge_and_unload), and save_pretrained"))
    index, names = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists() and not (folder / "model.safetensors").exists():
        parts = read_object(index).get("weight_map")
        if not isinstance(parts, dict):
            raise UserError(folder_problem(index, "must be an index of safetensors files"))
        names = {Path(str(name)).name for name in parts.values()}
    stored: Stored = {}
    for path in (folder / name for name in sorted(names)):
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            rule = f"must be a complete safetensors file ({error}); pickled weights (*.bin) are never loaded"
            raise UserError(folder_problem(path, rule)) from error
        for name in file.keys():  # noqa: SIM118
            known = name == HEAD or name.startswith(prefix)
            stored[name if known else prefix + name] = file.get_slice(name)
    return stored


def _misfits(folder: Path, stored: Stored, wanted: dict[str, Source], ignored: set[str]) -> Iterator[Problem]:
    """Every tensor that is missing, unexpected, or of another shape or kind."""
    shapes = {name: shape for source in wanted.values() for name, shape in source.shapes.items()}
    for name, shape in shapes.items():
        header = stored.get(name)
        if header is None or tuple(header.get_shape()) != shape or header.get_dtype() not in FLOATING:
            yield folder_problem(folder, f"must have {name} of the shape {[*shape]}, in one of {', '.join(FLOATING)}")
    for name in stored.keys() - shapes.keys() - ignored:
        if not NOT_WEIGHTS.search(name):
            yield folder_problem(folder, f"must have no tensors but the model's own, and holds {name}")


def _tensor(folder: Path, stored: Stored, name: str) -> Tensor:
    tensor: Tensor = stored[name][:]
    if not torch.isfinite(tensor).all():
        raise UserError(folder_problem(folder, f"must hold finite numbers, unlike {name}"))
    return tensor
