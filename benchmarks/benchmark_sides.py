"""The sides of the benchmark, each in a process of its own: as its user starts it, with a heap of its own.

megalite's side is its real training step (gradient buffers, fp32 masters, clipping, AdamW) after the start-up of a run.
The peer's is the loop that one writes by hand around transformers' model of the same shape; the plain loop's is
nanoGPT's way (benchmark_loop.py).
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import transformers
from benchmark_loop import PlainLoop
from torch import Tensor, nn

from megalite.config.compose import load_config
from megalite.config.schema import Config, ModelConfig
from megalite.data.batch import whole_batch
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.environment import read_environment, set_variables
from megalite.model.flops import parameter_count
from megalite.train.build import build_training, data_share, derive_device, fill_with_start_values, open_context
from megalite.train.step import PendingMetrics, TrainStep

LEARNING_RATE = 1e-4
WARM_UP_STEPS = 2  # compiling, first touch of memory, choice of kernels
PAUSE_S = 0.02  # before a turn: threads of the other side that wait for work fall asleep meanwhile


@dataclass(frozen=True)
class Shape:
    """A model and its sequence length as overrides, and the sequences per step: few on a CPU, enough to fill a GPU."""

    overrides: tuple[str, ...]
    cpu_batch: int
    cuda_batch: int
    beside: str = "peer"  # of SIDES

    def config(
        self,
        batch: int,
        precision: str,
        device: torch.device,
        *overrides: str,
        world_size: int = 1,
        data_ranks: int = 1,
    ) -> Config:
        """megalite's resolved configuration: one microbatch on each of `data_ranks`."""
        batch_sizes = (f"train.global_batch_size={batch}", f"train.micro_batch_size={batch // data_ranks}")
        return load_config(
            [
                *self.overrides,
                *batch_sizes,
                f"precision={precision}",
                f"device={device.type}",
                "tokenizer=byte",
                *overrides,
            ],
            world_size,
        )


GPT2 = ("model=gpt2", "model.vocab_size=50257")
SHAPES = {
    "tiny": Shape(("model=tiny", "model.vocab_size=4096", "train.seq_length=256"), 8, 128),
    "tiny_moe": Shape(("model=tiny_moe", "model.vocab_size=4096", "train.seq_length=256"), 8, 128),
    "gpt2": Shape((*GPT2, "train.seq_length=1024"), 1, 32),
    "shakespeare_char_cpu": Shape(  # nanoGPT's recipe for CPUs
        (
            "model.vocab_size=65",
            "train.seq_length=64",
            "model.num_layers=4",
            "model.hidden_size=128",
            "model.position=learned",
            "model.norm=layernorm",
            "model.activation=gelu_tanh",
        ),
        12,
        12,
        "plain loop",
    ),
    "1.3b": Shape(
        (
            *GPT2,
            "train.seq_length=2048",
            "model.max_positions=2048",
            "model.num_layers=24",
            "model.hidden_size=2048",
            "model.num_attention_heads=16",
        ),
        1,
        8,
    ),
}


def build_peer(config: ModelConfig, seq: int) -> nn.Module:
    """transformers' model of the same shape, without dropout: with rotary positions Llama or, with experts, Mixtral by
    grouped products; else GPT-2."""
    settings: Any
    experts: dict[str, Any] = {}
    if config.position == "rope":
        kind, width = transformers.LlamaConfig, config.ffn_hidden_size
        if config.moe.num_experts:
            kind, width = transformers.MixtralConfig, config.moe.ffn_hidden_size
            losses = {"output_router_logits": True, "router_aux_loss_coef": config.moe.aux_loss_coeff}
            experts = {"num_local_experts": config.moe.num_experts, "num_experts_per_tok": config.moe.top_k, **losses}
        settings = kind(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=seq,
            tie_word_embeddings=config.tie_embeddings,
            rms_norm_eps=config.norm_eps,
            **experts,
        )
    else:
        settings = transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_positions,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_hidden_size,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    settings.use_cache = False
    transformers.logging.set_verbosity_error()  # its own default of the loss makes it warn
    kernels = {"attn_implementation": "sdpa"} | ({"experts_implementation": "grouped_mm"} if experts else {})
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings, **kernels)
    return model.train()


class Megalite:
    """megalite's training step on batches that exist already."""

    def __init__(self, config: Config, context: ParallelContext, tokens: Tensor) -> None:
        self.training = build_training(config, context)
        fill_with_start_values(self.training.buffers, config, context)
        self._train = TrainStep(self.training, config.optimizer, context)
        labels = tokens.roll(-1, dims=1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, -1] = False  # transformers, too, has no label for the last token
        whole = whole_batch(tokens, labels, mask, positions, None, 0)
        self._batch = whole.part(data_share(context).sequence)
        self._labels = int(self._batch.loss_mask.sum())

    def step(self, microbatches: int = 1) -> PendingMetrics:
        """One step, which the device may still be working on."""
        return self._train([self._batch] * microbatches, self._labels * microbatches, LEARNING_RATE)


class Peer:
    """The loop that one writes by hand."""

    def __init__(self, config: Config, context: ParallelContext, tokens: Tensor) -> None:
        self.model = build_peer(config.model, config.train.seq_length).to(device=context.device, dtype=context.dtype)
        self._forward: Callable[..., Any] = torch.compile(self.model) if config.train.compile else self.model
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self._clip = config.optimizer.clip_grad
        self._tokens = tokens
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        assert parameters == parameter_count(config.model), parameters

    def step(self) -> Tensor:
        """One step; returns its loss, a device tensor."""
        loss: Tensor = self._forward(input_ids=self._tokens, labels=self._tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Side:
    """A side's process, which trains when it is asked to."""

    def __init__(self, name: str, config: Config, limit_s: float | None = None) -> None:
        """`name` is one of SIDES. Returns when the side is warm. `limit_s` is for that, and for each turn after it."""
        spawning = multiprocessing.get_context("spawn")
        self._name, self._limit_s = name, limit_s
        self._connection, other_end = spawning.Pipe()
        self._process = spawning.Process(target=_take_turns, args=(other_end, name, config, torch.get_num_threads()))
        with environment_kept():  # the process inherits it
            if name == "megalite":
                set_variables(os.environ)  # as the launcher does before torch is imported
            self._process.start()
        other_end.close()  # so that this end notices where the process is gone
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def seconds(self, repeat: int) -> float:
        """Seconds of a step, the mean of `repeat`."""
        return self.turn(repeat).seconds

    def turn(self, repeat: int) -> "Turn":
        """A turn of `repeat` steps; its figures are means."""
        time.sleep(PAUSE_S)
        return self._answer(repeat)

    def _answer(self, request: int | None = None) -> "Turn":
        """RuntimeError where the process is gone or too slow."""
        try:
            if request is not None:
                self._connection.send(request)
            if not self._connection.poll(self._limit_s):
                raise RuntimeError(f"the side {self._name} takes more than {self._limit_s} s")
            turn: Turn = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            rule = f"the process of the side {self._name} is gone (exit status {status}); what it said stands above"
            raise RuntimeError(rule) from None
        return turn


class Turn(NamedTuple):
    """Seconds of a step, the host's seconds before it waits, and on CUDA the most GiB allocated."""

    seconds: float
    host_s: float
    gib: float


SIDES: Mapping[str, Callable[[Config, ParallelContext, Tensor], Megalite | Peer | PlainLoop]] = {
    "megalite": Megalite,
    "peer": Peer,
    "plain loop": PlainLoop,
}


def _take_turns(connection: Connection, name: str, config: Config, threads: int) -> None:
    """A side's process: an answer when it is warm, then one for each number of steps that it is asked for."""
    if name == "megalite":
        context = open_context(config, read_environment(os.environ))
        config = derive_device(config, context)
    else:
        context = ParallelContext(device=torch.device(config.device), dtype=DTYPES[config.precision])
    torch.set_num_threads(threads)
    shape = config.train.global_batch_size, config.train.seq_length
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(0, config.model.vocab_size or 0, shape, generator=generator).to(context.device)
    step = SIDES[name](config, context, tokens).step
    repeat = WARM_UP_STEPS + (3 if context.device.type == "cuda" else 0)  # two are timed, one is captured
    while True:
        connection.send(turn_of(step, repeat, context.device))
        repeat = connection.recv()


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Restore afterwards what changes meanwhile."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def seconds_of(work: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Mean seconds of one call, the device's work included."""
    return turn_of(work, repeat, device).seconds


def turn_of(work: Callable[[], object], repeat: int, device: torch.device) -> Turn:
    """The means of so many calls."""
    on_cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    launched = time.perf_counter()
    wait()
    gib = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0
    return Turn((time.perf_counter() - begin) / repeat, (launched - begin) / repeat, gib)
