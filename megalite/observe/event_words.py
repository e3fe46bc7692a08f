"""Says in words what an event of a run tells besides its kind: for the terminal, the log and the report."""

from collections.abc import Mapping
from typing import Any

from megalite.errors.words import several
from megalite.observe import readable

WORDS = {
    "skipped_on_request": "passed over, it is one of train.skip_steps",
    "empty": "passed over, no token of its batch enters the loss",
}


def words_of(event: Mapping[str, Any]) -> str:
    """`event`: as in events.jsonl, where a user may have left things out."""
    match kind := event["kind"]:
        case "start" | "resume":
            hosts = event.get("hosts") or []
            places = f" on {len({*hosts})} hosts" if len({*hosts}) > 1 else ""
            device, torch = event.get("device", "device unknown"), (event.get("versions") or {}).get("torch", "?")
            where = f"{several(len(hosts), 'rank')}{places}, {device}, torch {torch}"
            return "; ".join([where, *(event.get("changes") or [])])
        case "skipped":
            scale = event.get("loss_scale")
            at = "" if scale is None else f" at a loss scale of {scale:g}"
            values = f"loss {event.get('loss')}, gradient norm {event.get('grad_norm')}{at}"
            return f"loss or gradient is not finite, the step is not applied: {values}"
        case "checkpoint":
            size, took = readable.size(event["bytes"]), readable.step_time(event["seconds"])
            return f"{size} in {took}, training held up for {event['stall_s']:.3f} s"
        case "straggler":
            rank, host, times = event["rank"], event["host"], event["times"]
            costs = f", which costs {readable.percent(event['share'])} of each step" if "share" in event else ""
            return f"rank {rank} on {host} computes {times:.2f} times as long as others with the same work{costs}"
        case "profile":
            return f"profiled into {event.get('folder')}"
        case "finished" | "stopped":
            by = [f"by {event.get('by')}"] if kind == "stopped" else []
            lost = ["its last state could not be saved"] if event.get("status") else []
            return "; ".join([*by, *lost])
        case _:
            return WORDS.get(kind) or str(event.get("message") or "")
