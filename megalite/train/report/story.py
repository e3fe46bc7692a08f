"""A run's events in words."""

from collections.abc import Iterator
from typing import Any

from megalite.train import readable
from megalite.train.report.blocks import moment
from megalite.train.report.data import FIRST, RunData
from megalite.train.report.markup import Markup, tag

STYLES = {
    "skipped": "warn",
    "checkpoint_failed": "bad",
    "straggler": "warn",
    "failed": "bad",
    "finished": "good",
}


def status_of(run: RunData, *, live: bool) -> tuple[str, str]:
    """How a run stands, in a word, and the style of that word."""
    if run.end is not None:
        kind = str(run.end["kind"])
        if kind != "failed" and run.end.get("status"):
            return f"{kind}, not saved", "bad"
        return kind, {"finished": "good", "failed": "bad"}.get(kind, "warn")
    if live:
        return "running", "run"
    return ("not ended" if run.starts else "end unknown"), "warn"


def event_rows(run: RunData) -> Iterator[list[str]]:
    """Rows of a table, newest first: time, step, kind, what there is to say."""
    for at, event in reversed(list(enumerate(run.told))):
        if run.left_out and at == FIRST - 1:
            yield ["", "", "", f"{run.left_out:,} more are in events.jsonl"]
        kind = str(event["kind"])
        word: Markup | str = kind.replace("_", " ")
        if kind in STYLES:
            word = tag("b", word, class_=STYLES[kind])
        step = tag("span", f"{event['step']:,}", class_="whole")
        yield [moment(event.get("time") or 0.0), step, word, said(event)]


def said(event: dict[str, Any]) -> str:
    """What one event has to say besides its kind."""
    kind = event["kind"]
    if kind in ("start", "resume"):
        return _start(event)
    if kind == "skipped":
        scale = event.get("loss_scale")
        where = "" if scale is None else f" at a loss scale of {scale:g}"
        return f"loss {event.get('loss')}, gradient norm {event.get('grad_norm')}{where}: not applied"
    if kind == "skipped_on_request":
        return "its data was passed over (train.skip_steps)"
    if kind == "straggler":
        return (
            f"rank {event.get('rank')} on {event.get('host')} computes {event.get('times', 0.0):.2f} times as long as "
            "others with the same work"
        )
    if kind == "finished" and event.get("status"):
        return "its last state could not be saved"
    if kind == "stopped":
        lost = "; its last state could not be saved" if event.get("status") else ""
        return f"by {event.get('by')}{lost}; the same command continues"
    if kind == "profile":
        wall = event.get("wall_s") or 1.0
        shares = (f"{part} {readable.percent(seconds / wall)}" for part, seconds in event.get("parts", {}).items())
        return f"traces in {event.get('folder')}; rank 0: {', '.join(shares)}"
    return str(event.get("message") or "")


def _start(event: dict[str, Any]) -> str:
    versions, hosts = event.get("versions") or {}, event.get("hosts") or []
    ranks = f"{len(hosts)} rank{'s' if len(hosts) != 1 else ''}"
    where = f" on {len(set(hosts))} hosts" if len(set(hosts)) > 1 else ""
    told = f"{ranks}{where}, {event.get('device', 'device unknown')}, torch {versions.get('torch', '?')}"
    failed = event.get("changes") or []
    return told + "".join(f"; {change}" for change in failed)
