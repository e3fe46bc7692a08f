"""What a run on ranks that share sequences tells of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.layout.ranks import ParallelLayout
from megalite.train.history import read_metrics
from tests.train.runs import train_on_rank, write_text
from tests.train.test_run import config_for, run_on


def test_a_run_tells_its_exchange_its_cuts_and_how_long_it_waited_for_keys(tmp_path: Path) -> None:
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", seq_length=64)
    config.parallel = replace(config.parallel, cp=2, cp_comm="ring")
    config.model = replace(config.model, attention_dropout=0.0)  # a ring has no whole rows of probabilities
    config.data = replace(config.data, cross_document_attention=False)
    assert run_on(ParallelLayout(cp=2), config, train_on_rank) == [0, 0]
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert "the 2 ranks of a sequence exchange keys by ring: as set" in log
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl", pytest.fail) if "loss" in line]
    microbatches = config.train.global_batch_size // (config.train.micro_batch_size or 1)
    assert steps
    for line in steps:
        assert sum(line["cuts"].values()) == microbatches
        assert {*line["cuts"]} <= {"zigzag", "stripes"}
        assert line["time_split"]["exchange"] > 0
