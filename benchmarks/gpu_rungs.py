"""The rungs of gpu_campaign.py. Each is a function of the device whose figures are numbers by name; it raises where
something is wrong. On a CPU the same code runs small shapes.

    python benchmarks/gpu_rungs.py NAME DEVICE FIGURES.json
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmark_sides import GPT2, SHAPES, SIDES, Megalite, Shape, seconds_of, turn_of
from gpu_campaign import TIMINGS, Timing
from gpu_operations import attention, embedding, fp8_products, head_and_loss, products, rotary
from torch import Tensor

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.environment import read_environment, set_variables
from megalite.launch.process import end_compile_workers
from megalite.model.flops import flops_per_token, peak_flops
from megalite.train.build import derive_device, open_context

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]
ROUNDS, STEPS = 5, 10  # of a timing: the middle of so many means of so many steps
WARM_UP = 5  # steps: two compile, two decide on a CUDA graph, one captures it
TINY = ("model=tiny", "model.vocab_size=300", "model.num_layers=2", "model.hidden_size=32", "train.seq_length=16")
LLAMA = ("model=tiny", "model.vocab_size=32000", "model.tie_embeddings=false")
WIDE = ("model.hidden_size=4096", "model.num_attention_heads=32", "model.ffn_hidden_size=11008")
MEDIUM = ("model.num_layers=24", "model.hidden_size=1024", "model.num_attention_heads=16")
EXPERTS = ("model=qwen3_30b_a3b", "model.vocab_size=32000", "model.num_layers=4", "model.qk_norm=false")
REHEARSED = (  # on a CPU, in place of a shape's own sizes
    *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_key_value_heads=4"),
    *("model.head_size=16", "model.ffn_hidden_size=128", "model.vocab_size=300", "train.seq_length=32"),
)
FEW_EXPERTS = ("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32")
CAMPAIGN = {
    "124M": SHAPES["gpt2"],
    "1.3B": SHAPES["1.3b"],
    "7B, 8 layers": Shape((*LLAMA, *WIDE, "model.num_layers=8", "train.seq_length=4096"), 1, 2),
    "350M": Shape((*GPT2, *MEDIUM, "train.seq_length=1024"), 1, 16),
    "experts, 4 layers": Shape((*EXPERTS, "train.seq_length=4096"), 1, 4),  # of the width of Qwen3-30B-A3B
}


# --- is it right? -----------------------------------------------------------------------------------------------------


def steps(device: torch.device) -> Figures:
    """Losses of five steps in fp64 and fp32 beside the CPU's fp64."""
    shape, found = Shape(TINY, 2, 2), {}
    wanted = [loss for loss, _ in _trained(shape, "fp64", torch.device("cpu"), 5)]
    for precision, bound in (("fp64", 1e-9), ("fp32", 1e-4)):
        losses = [loss for loss, _ in _trained(shape, precision, device, 5)]
        found[precision] = max(abs(loss / other - 1) for loss, other in zip(losses, wanted, strict=True))
        assert found[precision] < bound, (precision, losses, wanted)
    return found


def _trained(shape: Shape, precision: str, device: torch.device, count: int) -> Iterator[tuple[float, float]]:
    side = _side(shape.config(2, precision, device))
    for _ in range(count):
        figures = side.step().read()
        yield figures.loss, figures.grad_norm


def training(device: torch.device) -> Figures:
    """A real run of 30 steps: its loss falls."""
    with tempfile.TemporaryDirectory() as folder:
        losses = _run(device, Path(folder, "run"), 30)
    assert losses[-1] < 0.9 * losses[0], losses
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def resuming(device: torch.device) -> Figures:
    """A run that is killed and started again has the losses of one that was not, bit for bit."""
    steps, repeatable = 100, ["train.deterministic=true", "checkpoint.async=false"]
    with tempfile.TemporaryDirectory() as folder:
        whole = _run(device, Path(folder, "whole"), steps, *repeatable)
        broken = Path(folder, "broken")
        _run(device, broken, steps, *repeatable, kill_after=12)
        resumed = _run(device, broken, steps, *repeatable)
        events = [json.loads(line) for line in (broken / "events.jsonl").read_text().splitlines()]
    [resumed_at] = [event["step"] for event in events if event["kind"] == "resume"]
    assert 0 < resumed_at < steps, resumed_at
    assert resumed == whole, (resumed, whole)
    return {"steps": float(len(whole)), "resumed_at": float(resumed_at)}


def _run(device: torch.device, folder: Path, count: int, *more: str, kill_after: int = 0) -> list[float]:
    """The losses of a run of the launcher. It is killed once it has recorded so many steps."""
    settings = [f"run_dir={folder}", f"device={device.type}", f"train.steps={count}", "checkpoint.interval=10", *more]
    small = [] if device.type == "cuda" else ["model.num_layers=1", "model.hidden_size=64", "train.seq_length=64"]
    quiet = ["train.eval_interval=0", "train.sample_tokens=0", "log.wandb=disabled"]
    quiet += ["tokenizer=byte", "lr.warmup_steps=0"]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *settings, *small, *quiet]
    metrics, process = folder / "metrics.jsonl", subprocess.Popen(command)
    while kill_after and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= kill_after:
            process.kill()
    status = process.wait()
    assert status == (-signal.SIGKILL if kill_after else 0), f"exit status {status}"
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines() if not kill_after]


def gpu_tests(device: torch.device) -> Figures:
    """All tests that need a GPU, four at a time."""
    marked = re.compile(r"pytest\.mark\.gpu[)\n]|triton_device: ")
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if marked.search(path.read_text())]
    options = ["-m", "gpu", "-p", "no:cacheprovider", "-rf", "-W", "ignore", "--tb=short", "--show-capture=no"]
    workers = "4" if device.type == "cuda" else "0"
    command = [sys.executable, "-m", "pytest", *options, "-n", workers, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(done.stdout[-3000:], done.stderr[-1000:])
    counted = {word: float(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)}
    assert done.returncode == 0, counted
    assert "passed" in counted or device.type == "cpu", counted  # without a GPU all are skipped
    return counted


# --- how fast? --------------------------------------------------------------------------------------------------------


def ceilings(device: torch.device) -> Figures:
    """Rates of large bf16 products and of copies."""
    source = torch.zeros(1 << 28 if device.type == "cuda" else 1 << 20, device=device)
    target = torch.empty_like(source)
    copy = min(seconds_of(lambda: target.copy_(source), 5, device) for _ in range(5))
    n = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    product = min(seconds_of(lambda: torch.mm(left, right, out=out), 5, device) for _ in range(5))
    return {"product_tflops": 2 * n**3 / product / 1e12, "copy_tb_per_s": 2 * source.nbytes / copy / 1e12}


def timed(timing: Timing, device: torch.device, *, rounds: int = ROUNDS) -> Figures:
    """A side's speed at a shape; without rounds it only compiles, for inductor's cache."""
    shape = SHAPES.get(timing.shape) or CAMPAIGN[timing.shape]
    config = _config(shape, device, *timing.settings, batch=timing.batch)
    if timing.side == "megalite":
        side = _side(config)
        batches, labels = [side._batch] * timing.microbatches, side._labels * timing.microbatches
        step: Callable[[], object] = partial(side._train, batches, labels, 1e-4)
    else:
        context = ParallelContext(device=device, dtype=DTYPES[config.precision])
        step = SIDES[timing.side](config, context, _tokens(config, context)).step
    warm = turn_of(step, WARM_UP, device)
    if not rounds:
        return {"warm_s": WARM_UP * warm.seconds}
    turns = sorted(turn_of(step, STEPS if device.type == "cuda" else 1, device) for _ in range(rounds))
    middle = turns[len(turns) // 2]
    tokens = config.train.global_batch_size * config.train.seq_length * timing.microbatches
    times = {"ms": middle.seconds * 1e3, "least_ms": turns[0].seconds * 1e3, "most_ms": turns[-1].seconds * 1e3}
    return _rates(config, device, tokens / middle.seconds) | times | {"host_ms": middle.host_s * 1e3, "gib": middle.gib}


def profile(device: torch.device) -> Figures:
    """Milliseconds of a step of 124M by kind of kernel."""
    side = _side(_config(CAMPAIGN["124M"], device))
    turn_of(side.step, 3, device)
    kinds = {"attention": r"fmha|flash|attention|sdpa", "triton": "triton", "product": r"gemm|cutlass|nvjet|xmma|mm"}
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        turn_of(side.step, 1, device)
    found: Figures = {}
    for event in recorded.key_averages():
        time_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        kind = next((kind for kind, names in kinds.items() if re.search(names, event.key.lower())), "other")
        found[f"{kind}_ms"] = found.get(f"{kind}_ms", 0.0) + time_us / 1e3
    return found


# --- what rungs share -------------------------------------------------------------------------------------------------


def _config(shape: Shape, device: torch.device, *overrides: str, batch: int | None = None) -> Config:
    if device.type == "cpu":  # a rehearsal
        cuda = ("train.attention", "train.fp8", "train.cuda_graph", "model.num_layers")
        known = [one for one in overrides if not one.startswith(cuda)]
        small = (*REHEARSED, *(FEW_EXPERTS if EXPERTS[0] in shape.overrides else ()))
        return shape.config(1, "fp32", device, *small, *known, "train.compile=false")
    config = shape.config(batch or shape.cuda_batch, "bf16", device, *overrides)
    return replace(config, train=replace(config.train, compile=True))


def _side(config: Config) -> Megalite:
    set_variables(os.environ)
    context = open_context(config, read_environment(os.environ))
    config = derive_device(config, context)
    tokens = _tokens(config, context)
    return Megalite(config, context, tokens)


def _tokens(config: Config, context: ParallelContext) -> Tensor:
    shape, generator = (config.train.global_batch_size, config.train.seq_length), torch.Generator().manual_seed(1)
    return torch.randint(0, config.model.vocab_size or 0, shape, generator=generator).to(context.device)


def _rates(config: Config, device: torch.device, tokens_per_s: float) -> Figures:
    """tokens/s and both kinds of MFU where the device's peak is known."""
    on_cuda = device.type == "cuda"
    dtype = str(DTYPES[config.precision]).removeprefix("torch.")
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if on_cuda else None
    found = {"tokens_per_s": tokens_per_s}
    for name, causal in (("mfu", False), ("mfu_causal", True)) if peak else ():
        found[name] = tokens_per_s * flops_per_token(config.model, config.train.seq_length, causal=causal) / (peak or 1)
    return found


RUNGS: dict[str, Callable[[torch.device], Figures]] = {
    **{work.__name__: work for work in (products, fp8_products, attention, rotary, head_and_loss, embedding)},
    **{work.__name__: work for work in (steps, training, resuming, ceilings)},
    "tests": gpu_tests,
    "kinds of kernels": profile,
    **{timing.name: partial(timed, timing) for timing in TIMINGS},
    **{f"warm {timing.name}": partial(timed, timing, rounds=0) for timing in TIMINGS},
}

if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__, "gpu_rungs.py is started by gpu_campaign.py")
        sys.exit(0)
    name, device_name, file = sys.argv[1:]
    try:
        figures = RUNGS[name](torch.device("cuda", 0) if device_name == "cuda" else torch.device("cpu"))
        Path(file).write_text(json.dumps(figures))
    finally:
        end_compile_workers()
