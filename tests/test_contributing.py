"""The worked examples of CONTRIBUTING.md fit the code as it is: applied to a copy of it, they work."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.warm import warm_python

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
WORK = """
from pathlib import Path
from megalite.config.settings import SETTINGS
from megalite.prepare.sources import pieces
from megalite.prepare.sources import Source
from megalite.pipeline.checker import check
from megalite.config.schedule_request import ScheduleRequest
from megalite.pipeline.schedules import build_schedule

for pp, microbatches in ((1, 3), (2, 3), (4, 8), (8, 4)):
    assert check(build_schedule(ScheduleRequest("eager", pp, microbatches))) == []
assert "eager" in SETTINGS["parallel.schedule"].choices
assert "relu2" in SETTINGS["model.activation"].choices
Path("mails.mbox").write_text("From a\\nSubject: one\\n\\nfirst\\n\\nFrom b\\n\\nsecond\\n")
assert [piece.text.strip() for piece in pieces(*Source("text", ("mails.mbox",)).plan())] == ["first", "second"]
"""


def changes() -> Iterator[tuple[str, str, str]]:
    """(file, text that is there, text that takes its place) of every place of every example."""
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"(?m)^--- ", block)[1:]:
            name, *places = re.split(r"(?m)^@@\n", part)
            for place in places:
                lines = [line or " " for line in place.splitlines()]
                before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
                yield name.strip(), before, after


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The code with all examples applied."""
    for name in ("megalite", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in changes():
        text = (tmp_path / name).read_text() if before else ""  # else the file is new
        fits = text.count(before) == 1 if before else not (tmp_path / name).exists()
        assert fits, f"CONTRIBUTING.md speaks of a place that {name} does not have:\n{before}"
        (tmp_path / name).write_text(text.replace(before, after) if before else after)
    return tmp_path


@pytest.mark.parametrize(
    ("heading", "new", "changed"),
    [
        ("A schedule", 0, 2),
        ("A model option", 0, 1),
        ("An attention", 1, 4),
        ("A second prediction head", 1, 4),
        ("An optimizer", 1, 2),
        ("A family of transformers", 1, 0),
    ],
)
def test_an_extension_costs_so_many_files_of_code(heading: str, new: int, changed: int) -> None:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    names = re.findall(r"(?m)^--- (megalite/.*)$", section)
    assert [(ROOT / name).exists() for name in names].count(False) == new
    assert len(names) - new == changed


def test_the_examples_work(copy: Path) -> None:
    assert len({name for name, _, _ in changes()}) == 21
    for name in {name for name, _, _ in changes()}:
        compile((copy / name).read_text(), name, "exec")
    done = subprocess.run([warm_python(), "-c", WORK], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OPTIMIZER = """
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megalite.launch.context import ParallelContext
from megalite.layout.ranks import ParallelLayout
from megalite.train import build
from tests.layouts.training import assert_same_training, small_config, train
from tests.ranks import run_ranks


class Reference:
    rounds = False

    def __init__(self, buffers, config, context):
        settings = config.optimizer
        self.before_change = lambda: None
        held = [(slot.record.decay, name) for name, (slot, _) in buffers.places.items()]
        self._pairs = [(torch.nn.Parameter(buffers.parameter(name)), buffers.gradient(name)) for _, name in held]
        decays = [(settings.weight_decay if decay else 0.0) for decay, _ in held]
        groups = [{"params": [one], "weight_decay": decay} for (one, _), decay in zip(self._pairs, decays)]
        self._torch = torch.optim.SGD(groups, lr=1.0, momentum=settings.betas[0])

    def state(self):
        return {}

    def step(self, lr, *, divisor, skip, decay_factor):
        for parameter, gradient in self._pairs:
            parameter.grad = gradient / divisor
        for group in self._torch.param_groups:
            group["lr"] = float(lr)
        self._torch.step()


def config(world_size, **axes):
    settings = {"name": "sgd", "lr": 0.5}
    return small_config(text, Path("cache"), "llama", world_size, optimizer=settings, parallel=axes)


if __name__ == "__main__":
    text = Path("text.txt")
    text.write_text("".join(f"line {number} of the text\\n" for number in range(400)))
    halves = [(ParallelLayout(dp=2), {}), (ParallelLayout(tp=2), {"tp": 2})]
    before, after = ((config(2, **axes), layout) for layout, axes in halves)
    f64 = torch.float64
    run_ranks(partial(train, steps=2, saved=Path("run/checkpoints")), 2, before[0], dtype=f64, layout=before[1])
    assert any("momentum." in path.read_bytes().decode(errors="ignore") for path in Path("run").rglob("*.*"))
    rest = partial(train, steps=3, continued=Path("run/checkpoints"))
    found = run_ranks(rest, 2, after[0], dtype=f64, layout=after[1])
    build.make_optimizer = Reference
    whole = train(ParallelContext(dtype=f64), config(1))
    names = ("losses", "grad_norms", "tokens", "gradients", "sizes", "layers")
    rest = {name: getattr(whole, name)[2:] for name in names}
    assert_same_training(found, replace(whole, **rest))
"""


def test_the_optimizer_of_the_page_is_torch_s_in_any_layout(copy: Path) -> None:
    """Two steps by ranks that share the momentum (ZeRO-1), three by ranks of tp, beside torch.optim.SGD."""
    (copy / "program.py").write_text(OPTIMIZER)
    done = subprocess.run([warm_python(), "program.py"], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "name", "passed"),
    [
        # losses and gradients in fp64 over tp 1 and 2, with sequence parallelism and without
        ("tests/layouts/test_tensor_parallel.py", "latent_size", 2),
        ("tests/layouts/test_tensor_parallel.py", "second_head", 3),  # over tp, cp and pp
        ("tests/model/test_second_head.py", "", 1),
        ("tests/hf/test_oracles.py", "mistral", 1),  # logits and gradients of transformers' model
    ],
)
def test_what_the_examples_add_computes_the_same(copy: Path, file: str, name: str, passed: int) -> None:
    shutil.copy(ROOT / "pyproject.toml", copy)
    rows = [warm_python(), "-m", "pytest", "-v", file, "-k", name]
    done = subprocess.run(rows, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{passed} passed" in done.stdout


@pytest.mark.long
def test_what_the_page_prints_works_on_the_examples(copy: Path) -> None:
    """But for the tests, which take minutes."""
    for name in ("conf", "docs", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "mails.mbox").write_text("From a\nSubject: one\n\nfirst\n\nFrom b\n\nsecond\n")
    lines = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    lines = [line.partition("  #")[0].strip() for line in lines]
    tried = [line for line in lines if "pytest" not in line]
    assert len(tried) == 12
    for line in tried:
        done = subprocess.run([warm_python(), *line.split()[1:]], cwd=copy, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if "megalite prepare" in line:
            assert "2 documents" in done.stdout
    check = [warm_python(), "scripts/configuration_docs.py", "--check"]
    assert subprocess.run(check, cwd=copy, check=False).returncode == 0
    assert "relu2" in (copy / "docs" / "configuration.md").read_text()


def test_the_steps_before_a_change_is_sent_are_those_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    steps = [step.strip() for line in block.splitlines() for step in line.split("&&")]
    assert len(steps) == 5
    assert [step for step in steps if step not in ci] == []


def test_the_mathematics_of_the_model_option(copy: Path) -> None:
    spec = importlib.util.spec_from_file_location("changed", copy / "megalite" / "config" / "activations.py")
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    sys.modules["changed"] = changed  # dataclasses look for it
    spec.loader.exec_module(changed)
    x = torch.tensor([-1.0, 3.0])
    assert changed.ACTIVATIONS["relu2"](x).tolist() == [0.0, 9.0]
    assert torch.equal(changed.ACTIVATIONS["gelu"](x), torch.nn.functional.gelu(x))


def test_the_files_that_the_page_names_are_there() -> None:
    names = re.findall(r"`((?:megalite|tests|scripts|benchmarks|conf|docs)/[\w./]+\w)`", PAGE)
    names += re.findall(r"\]\((docs/[\w./]+)", PAGE)
    assert len(names) > 10
    assert [name for name in names if not (ROOT / name).exists()] == []
