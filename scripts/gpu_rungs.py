"""The rungs of gpu_campaign.py. Each is a function of the device whose figures are numbers by name; it raises where
something is wrong. On a CPU the same code runs small shapes.

    python scripts/gpu_rungs.py NAME DEVICE FIGURES.json
"""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmark_sides import GPT2, SHAPES, SIDES, Megalite, Shape, Side, Turn, seconds_of, turn_of
from gpu_operations import attention, embedding, fp8_products, head_and_loss, products, rotary
from torch import Tensor

from megalite.config.schema import Config
from megalite.kernels.fp8 import OF_GRADIENTS
from megalite.launch.context import ParallelContext
from megalite.launch.device import DTYPES
from megalite.launch.environment import read_environment
from megalite.launch.host import end_compile_workers
from megalite.model.attention import KERNELS
from megalite.model.flops import flops_per_token, peak_flops
from megalite.train.build import start
from megalite.train.device_settings import derive_device

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, float]
Work = Callable[[torch.device], Figures | Iterator[Figures]]  # the latter: those so far, more than once
TURN_S = 75.0  # of a side in part 2: start, compiling and steps
TINY = ("model=tiny", "model.vocab_size=300", "model.num_layers=2", "model.hidden_size=32", "train.seq_length=16")
LLAMA = ("model=tiny", "model.vocab_size=32000", "model.tie_embeddings=false")
WIDE = ("model.hidden_size=4096", "model.num_attention_heads=32", "model.ffn_hidden_size=11008")
MEDIUM = ("model.num_layers=24", "model.hidden_size=1024", "model.num_attention_heads=16")
REHEARSED = (  # on a CPU, in place of a shape's own sizes
    *("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_key_value_heads=4"),
    *("model.ffn_hidden_size=128", "model.vocab_size=300", "train.seq_length=32"),
)
CAMPAIGN = {  # the shapes of part 2
    "124M": SHAPES["gpt2"],
    "1.3B": SHAPES["1.3b"],
    "7B shape, 8 layers": Shape((*LLAMA, *WIDE, "model.num_layers=8", "train.seq_length=4096"), 1, 2),
    "350M": Shape((*GPT2, *MEDIUM, "train.seq_length=1024"), 1, 16),
}


@dataclass(frozen=True)
class Rung:
    part: int
    name: str
    work: Work
    limit_s: float


# --- 1: is it right? --------------------------------------------------------------------------------------------------


def ceilings(device: torch.device) -> Figures:
    """What products and copies reach."""
    source = torch.zeros(1 << 28 if device.type == "cuda" else 1 << 20, device=device)
    target = torch.empty_like(source)
    copy = min(seconds_of(lambda: target.copy_(source), 5, device) for _ in range(5))
    return {"product_tflops": _product_flops(device) / 1e12, "copy_tb_per_s": 2 * source.nbytes / copy / 1e12}


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
    # The backward of cuDNN's and flash's attention adds in another order every time, flex attention's does not.
    steps, repeatable = 100, ["train.attention=flex"] if device.type == "cuda" else []
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


def gpu_tests(path: str, device: torch.device) -> Figures:
    """One file's tests that need a GPU."""
    options = "-m gpu -p no:cacheprovider -vv -W ignore --tb=short --show-capture=no"  # the last words say what failed
    command = [sys.executable, "-m", "pytest", *options.split(), path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(done.stdout[-3000:], done.stderr[-1000:])
    words = ("passed", "failed", "skipped")
    counted = {word: float(len(re.findall(rf" {word.upper()}\b", done.stdout))) for word in words}
    assert done.returncode == 0, counted
    return counted


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


# --- 2: is it fast? ---------------------------------------------------------------------------------------------------


def beside(name: str, device: torch.device) -> Iterator[Figures]:
    """A shape: megalite, the compiled transformers model and the compiled plain loop in turns, three rounds; the
    figures so far after each turn. A side that fails or takes too long has no more turns, and is an error at the end.

    Each turn is a process of its own, so that one model at a time is in memory: three of 1.3B fill more than an H100.
    What the first turn compiles, later ones find in inductor's cache.
    """
    config, product_flops, failed = _config(CAMPAIGN[name], device), _product_flops(device), dict[str, str]()
    found: Figures = {}
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    for side in [*SIDES] * 3:
        if side in failed:
            continue
        try:
            with Side(side, config, TURN_S) as process:
                turns[side].append(process.turn(10 if device.type == "cuda" else 1))
        except RuntimeError as error:
            failed[side] = str(error)
            continue
        middle = sorted(turns[side])[len(turns[side]) // 2]
        per_s = config.train.global_batch_size * config.train.seq_length / middle.seconds
        share = per_s * flops_per_token(config.model, config.train.seq_length, causal=False) / product_flops
        figures = _rates(config, device, per_s) | {"of_products": share, "host_ms": middle.host_s * 1e3}
        found |= {f"{side} {figure}": value for figure, value in (figures | {"gib": middle.gib}).items()}
        yield found
    assert not failed, failed


# --- 3: which choices? ------------------------------------------------------------------------------------------------


def choice(shape: str, batch: int | None, overrides: tuple[str, ...], device: torch.device) -> Figures:
    """megalite's speed at a shape with other settings."""
    config = _config(SHAPES[shape] if shape in SHAPES else CAMPAIGN[shape], device, *overrides, batch=batch)
    side = _side(config)
    turn_of(side.step, 3, device)
    turn = turn_of(side.step, 10 if device.type == "cuda" else 1, device)
    tokens = config.train.global_batch_size * config.train.seq_length
    return _rates(config, device, tokens / turn.seconds) | {"host_ms": turn.host_s * 1e3, "gib": turn.gib}


def with_cublas_lt(device: torch.device) -> Figures:
    if device.type == "cuda":  # TORCH_BLAS_PREFER_CUBLASLT is read when torch is imported
        torch.backends.cuda.preferred_blas_library("cublaslt")
    return choice("gpt2", None, (), device)


# --- what rungs share -------------------------------------------------------------------------------------------------


def _config(shape: Shape, device: torch.device, *overrides: str, batch: int | None = None) -> Config:
    if device.type == "cpu":  # a rehearsal
        cuda = ("train.attention", "train.fp8", "train.cuda_graph", "model.num_layers")
        known = [one for one in overrides if not one.startswith(cuda)]
        return shape.config(1, "fp32", device, *REHEARSED, *known, "train.compile=false")
    config = shape.config(batch or shape.cuda_batch, "bf16", device, *overrides)
    return replace(config, train=replace(config.train, compile=True))


def _side(config: Config) -> Megalite:
    context = start(config, read_environment({}))
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


def _product_flops(device: torch.device) -> float:
    """FLOP/s of a large product in bf16."""
    n = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * n**3 / min(seconds_of(lambda: torch.mm(left, right, out=out), 5, device) for _ in range(5))


def _rungs() -> Iterator[Rung]:
    for work in (ceilings, products, fp8_products, attention, rotary, head_and_loss, embedding, steps):
        yield Rung(1, work.__name__, work, 180 if work is attention else 90)  # it compiles three shapes
    for work in (training, resuming, profile):
        yield Rung(1, work.__name__, work, 150)
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        if re.search(r"pytest\.mark\.gpu[)\n]", path.read_text()):
            name = str(path.relative_to(ROOT))
            yield Rung(1, name, partial(gpu_tests, name), 90)
    for shape in CAMPAIGN:
        yield Rung(2, shape, partial(beside, shape), 200)
    for recipe in ("null", *OF_GRADIENTS):
        yield Rung(3, f"1.3B fp8 {recipe}", partial(choice, "1.3B", None, (f"train.fp8={recipe}",)), 120)
    for graph in ("false", "true"):
        setting = f"train.cuda_graph={graph}"
        yield Rung(3, f"gpt2 batch 4 {setting}", partial(choice, "gpt2", 4, (setting,)), 90)
    yield Rung(3, "tiny_moe", partial(choice, "tiny_moe", None, ()), 90)
    for kernels in KERNELS:
        for shape, more in (("gpt2", ()), ("7B shape, 8 layers", ("model.num_layers=2",))):
            chosen = (f"train.attention={kernels}", *more)
            yield Rung(3, f"{shape.split(',')[0]} {kernels}", partial(choice, shape, None, chosen), 90)
    yield Rung(3, "is fa4 right?", partial(attention, fa4=True), 180)
    yield Rung(3, "gpt2 cublasLt", with_cublas_lt, 90)
    for chunk in (2048, 4096, 16384):
        yield Rung(3, f"gpt2 chunk {chunk}", partial(choice, "gpt2", None, (f"model.loss_chunk_tokens={chunk}",)), 90)
    for batch in (8, 16, 64):
        launched = ("train.cuda_graph=false",)  # not only where the batch is small
        yield Rung(3, f"gpt2 batch {batch}", partial(choice, "gpt2", batch, launched), 90)


def write(found: Figures | Iterator[Figures], file: Path) -> None:
    """All figures that there are, however the work ends."""
    for figures in [found] if isinstance(found, dict) else found:
        file.write_text(json.dumps(figures))


RUNGS = tuple(_rungs())

if __name__ == "__main__":
    if "--help" in sys.argv:
        print(__doc__, "gpu_rungs.py is started by gpu_campaign.py")
        sys.exit(0)
    name, device_name, file = sys.argv[1:]
    rung = next(rung for rung in RUNGS if rung.name == name)
    try:
        write(rung.work(torch.device("cuda", 0) if device_name == "cuda" else torch.device("cpu")), Path(file))
    finally:
        end_compile_workers()
