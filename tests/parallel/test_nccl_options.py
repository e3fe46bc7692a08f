"""A file of NCCL options says what it says and no more, and everything wrong in it is told at once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.config.problems import Problem, UserError
from megalite.parallel.nccl_options import KEYS, MAX_BYTES, MEGATRON_GROUPS, NcclOptions, read_nccl_options

OURS = """
    tp cp cp-levels kv-replicas dp dp-cp dp-cp-instance dp-cp-across tp-pp tp-cp tp-dp tp-dp-cp pp embedding
    position-embedding ep etp etp-ep etp-ep-pp edp edp-instance edp-across instance world
"""
MEGATRON = """
    dp_cp intra_dp_cp dp cp hcp mp tp pp embd pos_embd tp_dp_cp tp_dp tp_cp ep ep_tp tp_ep_mp tp_ep_pp ep_dp
    intra_ep_dp inter_ep_dp intra_dist_opt_instance
"""

Read = Callable[[str | bytes], dict[str, NcclOptions]]
Refusals = Callable[[str | bytes], list[Problem]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a file with that content."""

    def read_text(content: str | bytes) -> dict[str, NcclOptions]:
        file = tmp_path / "nccl.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_nccl_options(file)

    return read_text


@pytest.fixture
def refusals(read: Read) -> Refusals:
    """The problems for which a file with that content is refused."""

    def problems(content: str | bytes) -> list[Problem]:
        with pytest.raises(UserError) as refused:
            read(content)
        return refused.value.problems

    return problems


def test_every_group_of_ours_and_of_megatron_is_in_the_table_once() -> None:
    assert sorted(MEGATRON_GROUPS) == sorted(MEGATRON.split())
    assert sorted(ours for groups in MEGATRON_GROUPS.values() for ours in groups) == sorted(OURS.split())


def test_a_group_gets_the_keys_that_the_file_gives_it_and_no_others(read: Read) -> None:
    text = """
    dp_cp: {cga_cluster_size: 0, min_ctas: 1, max_ctas: 32, net_name: ib, is_high_priority_stream: true}
    ep: {max_ctas: 8, is_high_priority_stream: false}
    pp: {}
    """
    assert read(text) == {
        "dp-cp": NcclOptions(0, 1, 32, "ib", True),
        "ep": NcclOptions(max_ctas=8, is_high_priority_stream=False),
        "pp": NcclOptions(),
    }


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("tp", {"tp", "kv-replicas"}),
        ("mp", {"tp-pp"}),
        ("ep_tp", {"etp"}),
        ("tp_ep_mp", {"etp-ep"}),
        ("inter_ep_dp", {"edp-across", "dp-cp-across"}),
        ("intra_dp_cp", {"dp-cp-instance"}),
    ],
)
def test_megatron_names_lead_to_our_groups(read: Read, name: str, ours: set[str]) -> None:
    assert read(f"{name}: {{max_ctas: 4}}") == dict.fromkeys(ours, NcclOptions(max_ctas=4))


def test_networks_are_the_same_in_any_case_so_that_equal_groups_share_a_communicator(read: Read) -> None:
    options = read("{cp: {net_name: IB}, dp: {net_name: ib}, ep: {net_name: 'Socket'}}")
    assert options["cp"] == options["dp"] == NcclOptions(net_name="ib")
    assert len(set(options.values())) == 2
    assert options["ep"].net_name == "socket"


def test_groups_may_share_their_options_by_an_alias(read: Read) -> None:
    options = read("dp_cp: &few {max_ctas: 4}\nep_dp: *few\n")
    assert options == {"dp-cp": NcclOptions(max_ctas=4), "edp": NcclOptions(max_ctas=4)}


@st.composite
def right_groups(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """What a right file may hold, by Megatron's names."""
    low, high = sorted(draw(st.tuples(st.integers(1, 32), st.integers(1, 32))))
    body = st.fixed_dictionaries(
        {},
        optional={
            "cga_cluster_size": st.integers(0, 8),
            "max_ctas": st.integers(high, 32),
            "net_name": st.sampled_from(["ib", "socket"]),
            "is_high_priority_stream": st.booleans(),
        },
    )
    groups = draw(st.dictionaries(st.sampled_from(MEGATRON.split()), body, min_size=1))
    return {name: {**keys, **({"min_ctas": low} if "max_ctas" in keys else {})} for name, keys in groups.items()}


@given(groups=right_groups())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_right_file_is_read_back_whole(read: Read, groups: dict[str, dict[str, Any]]) -> None:
    expected = {ours: NcclOptions(**groups[name]) for name in groups for ours in MEGATRON_GROUPS[name]}
    assert read(yaml.safe_dump(groups)) == expected


WRONG = [
    ("dp_pc: {max_ctas: 4}", "line 1: unknown group dp_pc", "dp_cp?"),
    ("etp: {max_ctas: 4}", "line 1: unknown group etp", "ep_tp?"),
    ("embedding: {max_ctas: 4}", "line 1: unknown group embedding", "embd?"),
    ("zzz: {max_ctas: 4}", "line 1: unknown group zzz", "one of tp, cp, hcp"),
    ("[tp]: {max_ctas: 4}", "line 1: unknown group [...]", "one of"),
    ("tp: {max_cta: 4}", "line 1: tp: unknown key max_cta", "max_ctas?"),
    ("tp: {}\ndp:\n  splitShare: 1", "line 3: dp: unknown key splitShare", "one of cga_cluster_size"),
    ("tp: &a {max_ctas: 4}\ndp: {<<: *a}", "line 2: dp: unknown key <<", "one of cga_cluster_size"),
    ("tp:", "line 1: tp: must be a mapping of keys", "tp: {max_ctas: 16}"),
    ("tp: 4", "line 1: tp: must be a mapping of keys", "tp: {max_ctas: 16}"),
    ("tp: [max_ctas, 4]", "line 1: tp: must be a mapping of keys", "tp: {max_ctas: 16}"),
    ("tp: {}\ndp: {}\ntp: {}", "line 3: tp is given twice, first on line 1", "keep one"),
    ("tp:\n  max_ctas: 4\n  max_ctas: 4", "line 3: tp: max_ctas is given twice, first on line 2", "keep one"),
    ("tp: {max_ctas: '4'}", "tp.max_ctas='4' must be a whole number", "1 to 32, or leave max_ctas out"),
    ("tp: {max_ctas: 4.0}", "tp.max_ctas=4.0 must be a whole number", "1 to 32"),
    ("tp: {max_ctas: true}", "tp.max_ctas=true must be a whole number", "1 to 32"),
    ("tp: {max_ctas: }", "tp.max_ctas= must be a whole number", "1 to 32"),
    ("tp: {max_ctas: !!int many}", "tp.max_ctas=many must be a whole number", "1 to 32"),
    ("tp: {max_ctas: " + "9" * 5000 + "}", "tp.max_ctas=" + "9" * 40 + "... must be a whole number", "1 to 32"),
    ("tp: {max_ctas: 0}", "tp.max_ctas=0 is out of range", "1 to 32"),
    ("tp: {max_ctas: 33}", "tp.max_ctas=33 is out of range", "1 to 32"),
    ("tp: {min_ctas: -1, max_ctas: 4}", "tp.min_ctas=-1 is out of range", "1 to 32"),
    ("tp: {cga_cluster_size: 9}", "tp.cga_cluster_size=9 is out of range", "0 to 8"),
    ("tp: {cga_cluster_size: -1}", "tp.cga_cluster_size=-1 is out of range", "0 to 8"),
    ("tp: {min_ctas: 9, max_ctas: 8}", "tp.min_ctas=9 must not be above max_ctas=8", "max_ctas from 9 to 32"),
    ("tp: {min_ctas: 40, max_ctas: 8}", "tp.min_ctas=40 is out of range", "1 to 32"),  # told once
    ("tp: {min_ctas: 9}", "tp.min_ctas=9 needs max_ctas too", "add max_ctas, 9 to 32"),
    ("tp: {net_name: eth0}", "tp.net_name=eth0 is no network that NCCL has itself", "ib or socket"),
    ("tp: {net_name: 1}", "tp.net_name=1 is no network that NCCL has itself", "ib or socket"),
    ("tp: {net_name: [ib]}", "tp.net_name=[...] is no network that NCCL has itself", "ib or socket"),
    ("tp: {is_high_priority_stream: 1}", "tp.is_high_priority_stream=1 must be true or false", "true or false"),
    ("tp: {is_high_priority_stream: 'true'}", "stream='true' must be true or false", "without quotes"),
    ("tp: {is_high_priority_stream: !!bool perhaps}", "stream=perhaps must be true or false", "true or false"),
    ('"\\e[31m": {max_ctas: 4}', r'unknown group "\x1b[31m"', "one of"),
    ("", "holds no options", "parallel.nccl_options=null"),
    ("# tp: {max_ctas: 4}", "holds no options", "parallel.nccl_options=null"),
    ("null", "must be a mapping of groups", "parallel.nccl_options=null"),
    ("- tp", "must be a mapping of groups", "dp_cp: {max_ctas: 16}"),
    ("tp: {max_ctas: 4", "line 1: not YAML: expected ',' or '}'", "dp_cp: {max_ctas: 16}"),
    ("tp: {}\n\tdp: {}", "line 2: not YAML", "dp_cp: {max_ctas: 16}"),
    ("tp: {}\n---\ndp: {}", "not YAML: but found another document", "dp_cp: {max_ctas: 16}"),
    ("tp: *nowhere", "line 1: not YAML: found undefined alias", "dp_cp: {max_ctas: 16}"),
    (b"\xff\xfe\xfa", "not YAML", "dp_cp: {max_ctas: 16}"),
    ('tp: "\\UFFFFFFFF"', "not YAML", "dp_cp: {max_ctas: 16}"),
    ("[" * 5000, "not YAML: maximum recursion depth exceeded", "dp_cp: {max_ctas: 16}"),
    ("tp: {}" + " " * MAX_BYTES, "is larger than 64 KiB", "3 KiB"),
]


@pytest.mark.parametrize(("text", "rule", "remedy"), WRONG, ids=[str(rule)[:60] for _, rule, _ in WRONG])
def test_a_wrong_file_is_refused_with_what_would_work(
    refusals: Refusals, tmp_path: Path, text: str | bytes, rule: str, remedy: str
) -> None:
    [problem] = refusals(text)
    assert rule in problem.rule
    assert remedy in problem.remedy
    assert (problem.setting, problem.value) == ("parallel.nccl_options", str(tmp_path / "nccl.yaml"))
    assert not problem.here
    assert all(line.isprintable() for line in str(problem).splitlines())


def test_everything_wrong_is_told_at_once_in_the_file_s_order(refusals: Refusals) -> None:
    text = """
    tp: {max_ctas: 64, net_name: infiniband, max_ctas: 8}
    everything: {max_ctas: 4}
    dp: 4
    cp: {min_ctas: 8, max_ctas: 4, cga_size: 2}
    tp: {}
    """
    rules = [problem.rule for problem in refusals(text)]
    wanted = ["tp.max_ctas=64", "tp.net_name=infiniband", "max_ctas is given twice", "unknown group everything"]
    wanted += ["dp: must be", "cp: unknown key cga_size", "cp.min_ctas=8", "tp is given twice"]
    assert len(rules) == len(wanted)
    assert all(part in rule for part, rule in zip(wanted, rules, strict=True))


def test_aliases_cannot_blow_up(refusals: Refusals) -> None:
    lines = ["a0: &a0 {max_ctas: 4}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 40)]
    lines += ["tp: &self {net_name: *self}"]
    rules = [problem.rule for problem in refusals("\n".join(lines))]
    assert len(rules) == 41
    assert "tp.net_name={...} is no network" in rules[-1]


@given(
    content=st.one_of(
        st.binary(max_size=40),
        st.text(st.sampled_from(" \n:{}[]&*!<>|\"'#%?-,.0x1eE_~@\\UFtpmax_ctascgfy"), max_size=60).map(str.encode),
        st.lists(
            st.sampled_from(["tp", "dp", ": ", "{", "}", "max_ctas: ", "!!int ", "'", "&a ", "*a", "1", ", "])
        ).map(lambda parts: "".join(parts).encode()),
    )
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_content_breaks_the_reader(read: Read, content: bytes) -> None:
    try:
        options = read(content)
    except UserError as error:
        str(error).encode()
    else:
        assert set(options) <= set(OURS.split())


@pytest.mark.parametrize(
    ("place", "rule"), [("missing", "there is no such file"), (".", "is a folder"), ("file/below", "no such file")]
)
def test_a_file_that_is_not_there_is_told_by_every_machine(tmp_path: Path, place: str, rule: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as refused:
        read_nccl_options(tmp_path / place, setting="some.setting")
    [problem] = refused.value.problems
    assert rule in problem.rule
    assert problem.here
    assert (problem.setting, problem.value) == ("some.setting", str(tmp_path / place))
    assert "some.setting=null" in problem.remedy


def test_a_file_that_cannot_be_read_is_told_by_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")  # chmod does not stop root

    (tmp_path / "nccl.yaml").touch()
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UserError, match="cannot be read: Permission denied") as refused:
        read_nccl_options(tmp_path / "nccl.yaml")
    assert refused.value.problems[0].here


def test_reading_needs_no_torch() -> None:
    code = "import sys, megalite.parallel.nccl_options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class OptionsWithoutCuda:
    """Stands in for ProcessGroupNCCL.Options where torch has no NCCL: records what is set on it."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()


@pytest.mark.parametrize("given_keys", [(), ("max_ctas",), ("cga_cluster_size", "net_name"), KEYS])
def test_torch_is_told_what_is_set_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, given_keys: tuple[str, ...]
) -> None:
    stand_in = SimpleNamespace(Options=OptionsWithoutCuda)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    values = {"cga_cluster_size": 0, "min_ctas": 2, "max_ctas": 8, "net_name": "ib", "is_high_priority_stream": True}
    wanted: dict[str, Any] = {key: values[key] for key in given_keys}
    options: Any = NcclOptions(**wanted).as_torch()
    assert options.is_high_priority_stream is wanted.pop("is_high_priority_stream", False)
    assert vars(options.config) == wanted


def test_each_group_gets_an_options_object_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`new_group` writes the members of the group into the object."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=OptionsWithoutCuda), raising=False)
    shared = NcclOptions(max_ctas=4)
    assert shared.as_torch() is not shared.as_torch()


@pytest.mark.gpu
def test_nccl_accepts_the_options(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    options = NcclOptions(2, 1, 8, "socket", True).as_torch()
    assert (options.config.cga_cluster_size, options.config.min_ctas, options.config.max_ctas) == (2, 1, 8)
    assert options.is_high_priority_stream
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.new_group([0], backend="nccl", pg_options=options, device_id=device)
        number = torch.ones(1, device=device)
        dist.all_reduce(number, group=group)
        assert number.item() == 1
    finally:
        dist.destroy_process_group()
