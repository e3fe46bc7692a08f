"""A file of NCCL options says what it says and no more, and everything wrong in it is told at once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config.nccl_options import GROUPS, read_nccl_options
from megalite.errors.problems import UserError
from megalite.layout.ranks import GroupNeeds, ParallelLayout, groups_of

MEGATRON = """
    dp_cp intra_dp_cp dp cp hcp mp tp pp embd pos_embd tp_dp_cp tp_dp tp_cp ep ep_tp tp_ep_mp tp_ep_pp ep_dp
    intra_ep_dp inter_ep_dp intra_dist_opt_instance
"""

Read = Callable[[str], dict[str, Mapping[str, Any]]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a file with that content."""

    def read_text(content: str) -> dict[str, Mapping[str, Any]]:
        (tmp_path / "nccl.yaml").write_text(content)
        return read_nccl_options(tmp_path / "nccl.yaml")

    return read_text


def test_every_group_of_megatron_is_known_and_every_communicator_of_ours_has_one() -> None:
    assert sorted(GROUPS) == sorted(MEGATRON.split())
    layout = ParallelLayout(tp=4, dp=4, pp=2, ep=2, etp=1)
    needs = GroupNeeds(kv_heads=2, optimizer_instances=2)
    named = {spec.name for spec in groups_of(layout, 0, needs).values() if spec.name != "saving"}
    assert named <= {ours for groups in GROUPS.values() for ours in groups}


def test_a_group_gets_the_keys_that_the_file_gives_it_and_no_others(read: Read) -> None:
    text = """
    tp: {cga_cluster_size: 0, min_ctas: 1, max_ctas: 32, net_name: ib, is_high_priority_stream: true}
    dp_cp: &few {max_ctas: 8}
    ep_dp: *few
    mp: {max_ctas: 2}
    pp: {}
    """
    every = {"cga_cluster_size": 0, "min_ctas": 1, "max_ctas": 32, "net_name": "ib", "is_high_priority_stream": True}
    few, none = {"max_ctas": 8}, dict[str, Any]()
    groups = {"tp": every, "kv-replicas": every, "dp-cp": few, "edp": few, "pp-forward": none, "pp-backward": none}
    assert read(text) == groups


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("dp_pc: {max_ctas: 4}", "is not: 'dp_pc'"),
        ("tp:", "is not: 'tp'"),
        ("tp: {max_cta: 4}", "is not: tp.max_cta=4"),
        ("tp: {max_ctas: true}", "is not: tp.max_ctas=True"),
        ("tp: {net_name: 1}", "is not: tp.net_name=1"),
        ("", "is not: a mapping"),
        ("- tp", "is not: a mapping"),
        ("tp: {max_ctas: 4", "cannot be read: while parsing"),
        ("tp: {max_ctas: 16}\ntp: {net_name: ib}\n", "duplicate key tp"),
        ("all: {}\ntp: {max_ctas: x, none: 1}\ncp: 4", "is not: 'all', tp.max_ctas='x', tp.none=1, 'cp'"),
    ],
)
def test_a_wrong_file_is_refused_with_all_that_is_wrong_and_what_would_work(
    read: Read, tmp_path: Path, text: str, wrong: str
) -> None:
    with pytest.raises(UserError) as refused:
        read(text)
    [problem] = refused.value.problems
    assert wrong in problem.rule
    assert "dp_cp: {max_ctas: 16}" in problem.hint or "a YAML file" in problem.hint
    assert (problem.setting, problem.value) == ("parallel.nccl_options", str(tmp_path / "nccl.yaml"))


def test_a_file_that_is_not_there_is_told_by_every_machine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"parallel\.nccl_options.*No such file") as refused:
        read_nccl_options(tmp_path / "missing")
    assert refused.value.problems[0].here
