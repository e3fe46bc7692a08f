"""Opens the trackers of a run: the places beside the run folder where it is shown."""

from pathlib import Path

from megalite.config.schema import Config
from megalite.observe.background import BackgroundTracker
from megalite.observe.tensorboard import TensorBoardTracker
from megalite.observe.views import Tell
from megalite.observe.wandb import wandb_tracker


def open_trackers(config: Config, folder: Path, step: int, tell: Tell) -> list[BackgroundTracker]:
    """The trackers that `config` asks for, for rank 0. The run continues after `step`."""
    trackers: list[BackgroundTracker] = []
    if config.log.tensorboard:
        trackers.append(
            BackgroundTracker(
                "tensorboard", lambda _: TensorBoardTracker(folder, step), tell, "metrics.jsonl has it all"
            )
        )
    if (wandb := wandb_tracker(config, folder, tell)) is not None:
        trackers.append(wandb)
    return trackers
