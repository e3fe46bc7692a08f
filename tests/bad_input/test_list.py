"""The 105 bad inputs of the list, each a row of this folder or explained here.

1-30    config        test_config.py
31-47   environment   test_environment.py
48-70   data          tests/prepare/test_bad_inputs_of_data.py, and test_data.py
71-93   checkpoint    test_checkpoint.py
94-105  on the way    none is refused: what happens is told, and tested where the explanation says
"""

import ast
from dataclasses import dataclass
from functools import cache
from itertools import chain

import pytest

from tests.bad_input import test_checkpoint, test_config, test_data, test_environment
from tests.prepare import test_bad_inputs_of_data
from tests.train.runs import ROOT

ROWS = {row.number for module in (test_config, test_environment, test_data, test_checkpoint) for row in module.ROWS}
ROWS |= {row.number for row in test_environment.ROWS_OF_RANKS}
ROWS |= {int(row.name.split()[0]) for row in test_bad_inputs_of_data.ROWS}


@dataclass(frozen=True)
class Explained:
    """Why an input of the list is no row. `tests` show what happens instead."""

    what: str
    why: str
    tests: list[str]


EXPLAINED = {
    29: Explained(
        "determinism with an operation that has none",
        "there is no such switch: a run on one layout repeats itself bit for bit, and a test would miss what does not",
        ["train/test_run.py::test_a_stopped_and_continued_run_equals_the_uninterrupted_one"],
    ),
    43: Explained(
        "the lock of a dead job",
        "it is taken over at once on the same machine, and from another one when its heart has stopped",
        [
            "checkpoint/test_run_folder.py::test_the_lock_of_a_killed_job_is_taken_over_at_once",
            "checkpoint/test_run_folder.py::test_a_still_lock_of_another_host_is_taken_over",
        ],
    ),
    44: Explained(
        "no key for wandb, or no network",
        "one line says so, and training goes on",
        [
            "observe/test_wandb.py::test_online_without_a_key_is_written_to_disk_and_asks_nothing",
            "observe/test_wandb.py::test_a_server_that_does_not_answer_costs_its_timeout_once",
        ],
    ),
    45: Explained(
        "a signal during the start",
        "the start ends at once, with status 128 and the number of the signal, in one line (none after a typed Ctrl-C)",
        [
            "config/test_launcher.py::test_ctrl_c_before_the_start_ends_with_130_and_no_traceback",
            "train/test_signal_in_start_up.py::test_a_start_says_by_what_it_was_ended",
        ],
    ),
    46: Explained(
        "bit for bit, and no OMP_NUM_THREADS",
        "each rank's number of threads follows from its cores, so that it is the same at every start",
        ["launch/test_device.py::test_local_ranks_share_the_cores"],
    ),
    59: Explained(
        "fewer samples than a global batch",
        "samples come again in another order, epoch after epoch; the header of a run says how many epochs it takes",
        ["data/test_samples.py::test_every_epoch_has_every_sample_in_a_new_order"],
    ),
    67: Explained(
        "one shard for training and validation",
        "there are no two lists: validation is the last part of each file's tokens, which training does not read",
        ["data/test_open_data.py::test_the_split_is_nanogpts"],
    ),
    68: Explained(
        "a rank that sees other files",
        "all ranks refuse and two that differ are named; that takes several ranks, so that it is a test of its own",
        ["prepare/test_bad_inputs_of_data.py::test_ranks_that_find_different_data_at_one_place_refuse_it"],
    ),
    70: Explained(
        "data that end before the steps do",
        "they begin again in another order",
        ["data/test_samples.py::test_every_epoch_has_every_sample_in_a_new_order"],
    ),
    81: Explained(
        "a checkpoint of another user",
        "whoever wrote it, nothing in a checkpoint is run, so that its owner does not matter",
        [
            "checkpoint/test_damage.py::test_a_manifest_is_checked_before_anything_follows_it",
            "checkpoint/test_damage.py::test_no_module_reads_pickles",
        ],
    ),
    87: Explained(
        "generators saved for another layout",
        "none are saved: all randomness is derived from the seed and the place in the run",
        ["kernels/test_dropout.py::test_the_mask_of_an_element_depends_on_its_global_coordinates_only"],
    ),
    88: Explained(
        "a checkpoint of the last step",
        "the run says that it is finished, and ends with status 0",
        ["bad_input/test_run_folder.py::test_a_start_that_has_nothing_to_do_changes_nothing"],
    ),
    90: Explained(
        "a pointer to the newest checkpoint that points to nothing",
        "there is no such pointer: the names of the folders say which is the newest",
        ["checkpoint/test_damage.py::test_only_exact_names_are_checkpoints"],
    ),
    91: Explained(
        "no checkpoint that can be read",
        "every row of damage, 72 to 77, damages all checkpoints of its run; of several, the intact one is used",
        [
            "checkpoint/test_damage.py::test_if_all_are_damaged_the_run_is_refused_and_nothing_renamed",
            "checkpoint/test_damage.py::test_the_one_before_is_used_and_the_damage_told",
        ],
    ),
    94: Explained(
        "a loss or gradient that is not finite",
        "the step is told, counted and not applied",
        [
            "train/test_run.py::test_a_step_that_is_not_finite_is_counted_and_not_applied",
            "observe/test_events.py::test_bad_steps_and_the_end_of_a_run_that_gives_up_are_told",
        ],
    ),
    95: Explained(
        "a loss scale at its least",
        "it stays there, and steps that overflow count as bad ones from then on",
        [
            "optim/test_loss_scale.py::test_every_sequence_of_overflows_gives_the_scale_of_the_rule",
            "train/test_run.py::test_too_many_bad_steps_in_a_row_stop_the_run_with_the_checkpoint_intact",
        ],
    ),
    96: Explained(
        "more bad steps in a row than are allowed",
        "the run stops with status 1 and names the checkpoint that is intact",
        ["train/test_run.py::test_too_many_bad_steps_in_a_row_stop_the_run_with_the_checkpoint_intact"],
    ),
    97: Explained(
        "a collective that a rank never joins",
        "the others end when the time is up, and name it",
        [
            "train/test_launch.py::test_a_rank_that_stands_still_is_named_when_the_time_is_up",
            "pipeline/test_lost_rank.py::test_the_others_end_in_time_and_name_it",
        ],
    ),
    98: Explained(
        "no progress",
        "ranks wait for each other in every step, so that it shows as a collective that a rank never joins",
        ["train/test_launch.py::test_a_rank_that_stands_still_is_named_when_the_time_is_up"],
    ),
    99: Explained(
        "saves that fail again and again",
        "each is told; training goes on, and the last one that was complete stays",
        ["train/test_run.py::test_a_save_that_fails_does_not_end_training"],
    ),
    100: Explained(
        "a save behind training that fails",
        "it is told at the next step",
        ["train/test_async_saving.py::test_a_failure_is_told_once_and_soon_and_training_goes_on"],
    ),
    101: Explained(
        "a stop that is asked for",
        "the step is finished and saved, and the status is 0",
        ["train/test_launch.py::test_a_signal_to_one_rank_ends_all_saved"],
    ),
    102: Explained(
        "a kill before the state is saved",
        "the next start goes on from the newest complete checkpoint and says which",
        ["train/test_resume.py::test_killed_twice_and_stopped_once_it_ends_where_the_uninterrupted_run_ends"],
    ),
    103: Explained(
        "a step that fails at every restart",
        "restarts are the launcher's, and it counts them; train.skip_steps passes the step over",
        ["train/test_ramp_and_skip.py::test_its_samples_are_those_that_nobody_trains_on"],
    ),
    104: Explained(
        "a data process that dies",
        "its status is told, with what may have killed it",
        ["bad_input/test_on_the_way.py::test_a_data_process_that_is_killed_is_named_with_what_may_have_killed_it"],
    ),
    105: Explained(
        "an accelerator without memory",
        "rank and step are named, with the settings that would need less",
        ["bad_input/test_on_the_way.py::test_a_step_without_memory_is_named_with_what_would_need_less"],
    ),
}


def test_every_input_of_the_list_is_a_row_or_explained() -> None:
    assert ROWS - {0} | set(EXPLAINED) == set(range(1, 106))
    assert ROWS & set(EXPLAINED) == set(), "what is a row needs no excuse"


@cache
def functions_of(file: str) -> set[str]:
    return {
        node.name for node in ast.parse((ROOT / "tests" / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("test", sorted(set(chain(*(one.tests for one in EXPLAINED.values())))))
def test_what_an_explanation_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions_of(file)
