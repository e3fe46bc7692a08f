"""TensorBoard's event files, read back."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.observe.tensorboard import TensorBoardTracker


def test_a_resume_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    for step, loss in ((0, 1.0), (2, 2.0)):
        tracker = TensorBoardTracker(tmp_path, step)
        for number in range(step + 1, 5):
            tracker.record({"step": number, "loss": loss, "mfu": None, "time_split": {"data": 0.5}})
        tracker.finish(0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert board.Tags()["scalars"] == ["loss", "time_split/data"]


def test_a_sample_is_shown_as_it_is(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.sample(3, "# a\n* b", " c")
    tracker.finish(0)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (name,) = board.Tags()["tensors"]
    (event,) = board.Tensors(name)
    assert event.step == 3
    assert event.tensor_proto.string_val == [b"    # a\n    * b c"]
