"""What training asks of a GPU, read in the log of one that computes nothing (docs/performance.md, "Without a GPU")."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = os.environ.get("MEGALITE_FAKEGPU", "")  # a script that runs a command there
STEADY = """
import ctypes, sys
log = ctypes.CDLL(None).fakegpu_log
log(0)
sys.path[:0] = ["benchmarks", "."]
import torch
from benchmark_sides import SHAPES, Megalite
from megalite.launch.process import ProcessEnvironment
from megalite.train.build import open_context
from megalite.train.build import derive_device
config = SHAPES["gpt2"].config(4, "bf16", torch.device("cuda"), "train.cuda_graph=false")
context = open_context(config, ProcessEnvironment())
config = derive_device(config, context)
side = Megalite(config, context, torch.zeros(4, 1024, dtype=torch.int64, device="cuda"))
for number, microbatches in enumerate((2, 2, 2, 2, 3)):
    log(int(number > 2))  # the last two steps alone: nothing of them is new
    labels = side._labels * microbatches
    side._train([side._batch] * microbatches, labels, 1e-3, next_local_tokens=labels)
log(0)
"""
PEAK = """
import sys
sys.path[:0] = ["benchmarks", "."]
import torch
from benchmark_sides import SHAPES, Megalite
from gpu_rungs import CAMPAIGN
from megalite.launch.process import ProcessEnvironment
from megalite.plan.gpu_memory import rank_memory
from megalite.train.build import derive_device, open_context
name, batch, *words = sys.argv[1:]
shape = {**SHAPES, **CAMPAIGN}[name]
config = shape.config(int(batch), "bf16", torch.device("cuda"), "train.cuda_graph=false", *words)
context = open_context(config, ProcessEnvironment())
config = derive_device(config, context)
tokens = torch.zeros(int(batch), config.train.seq_length, dtype=torch.int64, device="cuda")
side = Megalite(config, context, tokens)
for _ in range(2):
    side.step()
memory = rank_memory(config, context.layout, 0)
print("RATIO", (memory.total - memory.outside) / torch.cuda.max_memory_allocated())
"""
FA4 = """
import pathlib, torch
calls = pathlib.Path(__file__).with_name("calls").open("a", buffering=1)
def _flash_attn_fwd(q, k, v, *, causal, out, **options):
    print("forward", causal, *q.shape, *out.shape, file=calls)
    return out, torch.empty(len(q), q.shape[2], q.shape[1], device=q.device)
def _flash_attn_bwd(q, k, v, out, grad, lse, *, causal, **options):
    print("backward", causal, *q.shape, *grad.shape, file=calls)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
"""
ASYNC_TP = """
import sys
sys.path.insert(0, ".")
import torch, torch.distributed as dist
import torch._functorch.config
from torch.testing._internal.distributed.fake_pg import FakeStore
from megalite.config.compose import load_config
from megalite.data.batch import whole_batch
from megalite.kernels.embed import set_main_grad
from megalite.model.gpt import GPT
from megalite.tensor_parallel.collectives import TensorGroup
from megalite.tensor_parallel.collectives import share_memory
torch._functorch.config.force_non_lazy_backward_lowering = True
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
group, cuda = TensorGroup(dist.group.WORLD.group_name, 2, 0), torch.device("cuda", 0)
share_memory(group)
settings = "model=tiny model.num_layers=1 tokenizer=byte model.vocab_size=260 parallel.tp=2 parallel.async_tp=true"
config = load_config([*settings.split(), "device=cuda", "precision=bf16", "train.compile=true"], 2)
model = GPT(config, dtype=torch.bfloat16, device=cuda, tp=group)
for name, parameter in model.named_parameters():
    set_main_grad(parameter, torch.zeros(parameter.shape, device=cuda), name)
tokens = torch.zeros(8, 256, dtype=torch.int64, device=cuda)
batch = whole_batch(tokens, tokens, tokens == 0, torch.arange(256, device=cuda).expand(8, 256), None, 0)
x = torch.zeros(model.activation_shape(batch), dtype=torch.bfloat16, device=cuda, requires_grad=True)
model._run_blocks(x, batch, {}, None)  # compiled, it ends: there is no memory to share
"""
BLOCK = """
import sys
sys.path[:0] = ["benchmarks", "."]
import torch
from benchmark_sides import SHAPES
from megalite.data.batch import whole_batch
from megalite.kernels.embed import set_main_grad
from megalite.model.gpt import GPT
cuda = torch.device("cuda", 0)
config = SHAPES[sys.argv[1]].config(int(sys.argv[2]), "bf16", cuda, "model.num_layers=1", "train.compile=true")
model = GPT(config, dtype=torch.bfloat16, device=cuda)
for name, parameter in model.named_parameters():
    set_main_grad(parameter, torch.zeros(parameter.shape, device=cuda), name)
tokens = torch.zeros(config.train.global_batch_size, config.train.seq_length, dtype=torch.int64, device=cuda)
positions = torch.arange(tokens.shape[1], device=cuda).expand_as(tokens)
batch = whole_batch(tokens, tokens, tokens == 0, positions, None, 0)
x = torch.zeros(model.activation_shape(batch), dtype=torch.bfloat16, device=cuda, requires_grad=True)
out = model._run_blocks(x, batch, {}, None)
out.backward(torch.zeros_like(out))
"""
SETTINGS = "device=cuda precision=bf16 model=tiny model.num_layers=2 tokenizer=byte train.steps=3 parallel.tp=2"
LAUNCHES = ("K ", "T ", "G ", "GB ", "L ")
QUIET = "train.eval_interval=0 checkpoint.interval=0 train.sample_tokens=0 train.max_bad_steps=100 log.wandb=disabled"

pytestmark = [
    pytest.mark.fakegpu,
    pytest.mark.skipif(not FAKE, reason="MEGALITE_FAKEGPU names no script that runs a command with a fake GPU"),
]


def logged(command: list[str], log: Path, ranks: int = 1) -> list[list[str]]:
    """The lines of the log of each rank."""
    run(command, {"FAKEGPU_LOG": str(log / "log"), "FAKEGPU_COUNT": str(ranks)})
    found = [path.read_text().splitlines() for path in sorted(log.iterdir())]
    return [lines for lines in found if any(line.startswith(("G ", "L ")) for line in lines)]


def run(command: list[str], variables: dict[str, str], *, status: int = 0) -> str:
    """What the command prints. `status` 1: it must fail, however."""
    chosen = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    chosen |= {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}  # the fake driver maps no pages by hand
    environment = {**os.environ, **chosen, **variables}
    done = subprocess.run(
        ["bash", FAKE, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == (status != 0), done.stdout + done.stderr
    return done.stdout + done.stderr


STEADY_RUNS = [
    ("", (930, 429)),
    (', "train.deterministic=true"', (1098, 513)),
    (', "train.skip_spikes=6"', (970, 429)),
]


@pytest.mark.parametrize(("more", "most"), STEADY_RUNS)
def test_a_steady_step_waits_for_nothing_and_adds_weight_gradients_in_fp32(
    tmp_path: Path, more: str, most: tuple[int, int]
) -> None:
    """GPT-2 of 124M, two microbatches. `most`: launches when this was written, and those of one more microbatch."""
    [lines] = logged(["python", "-c", STEADY.replace('=false"', f'=false"{more}')], tmp_path)
    lines = [line for line in lines if not line.startswith(("EVENT", "WAIT"))]
    end = next(at for at, line in enumerate(lines) if "D2H" in line) + 1
    step, longer = lines[:end], lines[end:]
    assert [line for line in step if line.startswith("SYNC")] == []
    assert [line for line in step if "pageable" in line] == []
    assert [line.split()[3] for line in step if line.startswith("C") and "D2H" in line] == ["64"]
    added = [line for line in step if line.startswith(("G ", "L ")) and "beta=1" in line]
    assert len(added) == 2 * (4 * 12 + 1), "each weight in each microbatch, and the head's chunk"
    assert all(" C=0 " in line for line in added), "into fp32"
    launches, in_longer = ([line for line in one if line.startswith(LAUNCHES)] for one in (step, longer))
    assert len(launches) <= most[0]
    assert len(in_longer) - len(launches) <= most[1]
    assert any("flash_bwd" in line for line in launches) == ("deterministic" in more), "cuDNN's backward has no order"


@pytest.mark.parametrize(("shape", "sequences", "moved_gb"), [("gpt2", 32, 2.522), ("1.3b", 8, 3.362)])
def test_elementwise_passes_of_a_block_move_what_they_must(shape: str, sequences: int, moved_gb: float) -> None:
    """GB that inductor counts for each kernel that it writes, by their launches, as they were when this was written."""
    assert sum(passes_of(BLOCK, shape, str(sequences))[0]) == pytest.approx(moved_gb, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "kernels", "moved_gb"),
    [
        ('"train.fp8=tensorwise"', 73, 5.9),
        ('"train.fp8=rowwise"', 37, 4.72),
        ('"train.fp8=tensorwise", "train.fp8_weight_gradients=true"', 77, 6.83),
        ('"train.fp8=rowwise", "train.fp8_weight_gradients=true"', 58, 5.49),
    ],
)
def test_fp8_adds_few_passes_to_a_block(settings: str, kernels: int, moved_gb: float) -> None:
    """An inner block of 1.3B; transpositions, of two factors of each weight's gradient, are apart."""
    block = BLOCK.replace('"model.num_layers=1"', f'"model.num_layers=3", {settings}')
    block = block.replace("\ntokens =", '\ndel model.blocks["0"], model.blocks["2"]\ntokens =')
    moved, written = passes_of(block, "1.3b", "8")
    assert len(moved) <= kernels
    assert sum(moved) == pytest.approx(moved_gb, rel=0.01)
    assert written.count("= torch.ops.megalite.transposed.default(") == (8 if "weight" in settings else 0)


def passes_of(block: str, *words: str) -> tuple[list[float], str]:
    """GB of each launch of a kernel that inductor writes, and its code."""
    variables = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCH_LOGS": "output_code"}
    written = run(["python", "-c", block, *words], variables | {"TORCHINDUCTOR_BENCHMARK_KERNEL": "1"})
    size, moved, name = dict[str, float](), list[float](), ""
    for line in written.splitlines():
        if match := re.search(r"(triton_\w+) = async_compile", line):  # of backward they may have names of forward's
            name = match[1]
        elif match := re.search(r"'kernel_num_gb': ([\d.e-]+)", line):
            size[name] = float(match[1])
        elif match := re.search(r"(triton_\w+)\.run\([^*].*stream0\)", line):
            moved.append(size[match[1]])
    return moved, written


@pytest.mark.parametrize(
    "words",
    [
        ["gpt2", "8"],
        ["gpt2", "8", "model.num_layers=4", "precision=fp32"],
        ["7B, 8 layers", "2", "model.num_layers=2"],
        ["7B, 8 layers", "2", "model.num_layers=2", "train.recompute=full"],
        ["experts, 4 layers", "2", "model.num_layers=2", "model.moe.num_experts=32"],
    ],
)
def test_the_formula_for_memory_gives_the_allocators_peak(words: list[str]) -> None:
    """Right to 3 % below and 15 % above: what the choice of a microbatch leaves is 10 % of the device."""
    found = re.search(r"RATIO (\S+)", run(["python", "-c", PEAK, *words], {}))
    assert found is not None
    assert 0.97 < float(found[1]) < 1.15


def test_attention_fa4_calls_the_kernels_of_flash_attn_4(tmp_path: Path) -> None:
    """In each layer and microbatch; before it once, to see whether they run. The package here only takes notes."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "interface.py").write_text(FA4)
    (tmp_path / "logs").mkdir()
    script = STEADY.replace('"train.cuda_graph=false")', '"train.cuda_graph=false", "train.attention=fa4")')
    logged(["python", "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{script}"], tmp_path / "logs")
    calls = Counter((package / "calls").read_text().splitlines())
    tried, shape = "True 1 128 12 64 1 128 12 64", "True 4 1024 12 64 4 1024 12 64"
    trained = {f"forward {shape}": 132, f"backward {shape}": 132}  # 11 microbatches, 12 layers
    assert calls == {f"forward {tried}": 1, f"backward {tried}": 1, **trained}


def test_async_tp_joins_the_collectives_of_a_block_and_its_products() -> None:
    """In the code that inductor writes for a Llama block: all four of forward, in backward the four that are no gathers
    for weight gradients."""
    variables = {"FAKEGPU_COUNT": "2", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCH_LOGS": "output_code"}
    source = run(["python", "-c", ASYNC_TP], variables, status=1)
    assert source.count("symm_mem.fused_all_gather_matmul.default(") == 2 + 2
    assert source.count("symm_mem.fused_matmul_reduce_scatter.default(") == 2 + 2
    assert source.count("all_gather_into_tensor.default(") == 0 + 2


def test_reduce_scatters_of_tensor_parallel_backwards_hide_behind_products(tmp_path: Path) -> None:
    """And every communicator that is made is used."""
    start = ["torchrun", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py", *SETTINGS.split(), *QUIET.split()]
    (tmp_path / "logs").mkdir()
    for lines in logged([*start, f"run_dir={tmp_path}/run"], tmp_path / "logs", 2):
        made = sum(line.startswith("N init") for line in lines)
        used = {match[0] for line in lines if (match := re.search(r"comm=\S+", line))}
        assert made == len(used) > 0
        ends = [at for at, line in enumerate(lines) if line.startswith("C async D2H 64")]
        hidden, exposed = 0, 0
        for event, behind in waits(lines[ends[-2] : ends[-1]]):
            if event == "reducescatter":
                hidden, exposed = hidden + behind, exposed + (not behind)
        # Two blocks and the head: two of each block's backward and that of the head's are hidden; in forward nothing
        # can be, of the embedding's and two of each block.
        assert (hidden, exposed) == (5, 5)


def test_parameters_of_muon_travel_during_the_next_forward(tmp_path: Path) -> None:
    """Two owners, each a pair of tp: one exchange there and one back, then four buckets, behind which products hide."""
    (tmp_path / "logs").mkdir()
    words = [*SETTINGS.split(), *QUIET.split(), "optimizer=muon", "optimizer.bucket_size=500000"]
    start = ["torchrun", "--standalone", "--nproc-per-node", "4", "pretrain_gpt.py", *words, f"run_dir={tmp_path}/run"]
    for lines in logged(start, tmp_path / "logs", 4):
        ends = [at for at, line in enumerate(lines) if line.startswith("C async D2H 64")]
        step, forward = lines[ends[-3] : ends[-2]], lines[ends[-2] : ends[-1]]
        update = step[max(at for at, line in enumerate(step) if line.startswith("N allreduce")) + 1 :]
        sent = [re.sub(r" stream.*| n=\d+", "", line) for line in update if line.startswith("N ")]
        there = [f"N {way} type=9 peer={peer}" for peer in (0, 1) for way in ("send", "recv")]
        assert sent == there + there + ["N allgather type=9 of=2"] * 4
        gathers = [at for at, line in enumerate(update) if line.startswith("N allgather")]
        events = [update[at + 1].split()[1] for at in gathers]
        waits = [next(at for at, line in enumerate(forward) if line.endswith(f"event={event}")) for event in events]
        assert waits == sorted(waits)
        products = [at for at, line in enumerate(forward) if line.startswith(("G ", "L "))]
        assert [sum(at < wait for at in products) for wait in waits] == [0, 0, 0, 4], "the last waits behind a block"


def waits(lines: list[str]) -> list[tuple[str, bool]]:
    """For each collective that the compute stream waits for, its kind and whether a weight's gradient lies between."""
    found, starts, kind = [], dict[str, tuple[str, int]](), ""
    for at, line in enumerate(lines):
        words = line.split()
        if words[0] == "N":
            kind = words[1]
        elif words[0] == "EVENT" and kind:
            starts[words[1]], kind = (kind, at), ""
        elif words[0] == "WAIT" and words[1] == "stream=(nil)" and (event := words[2].removeprefix("event=")) in starts:
            name, since = starts.pop(event)
            found.append((name, any(each.startswith(("G ", "L ")) and "beta=1" in each for each in lines[since:at])))
    return found
