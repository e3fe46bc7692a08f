"""As much of a wandb server as wandb's client needs to send runs and to continue them; on this machine, for tests."""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """`history`: the lines that it was sent, by run; `exit_codes`: how runs ended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.exit_codes: dict[str, list[int]] = {}
        self.config: dict[str, Any] = {}  # of the last run that was opened
        self.away = False  # it answers nothing that a client likes

    def __enter__(self) -> "WandbServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are nobody's concern."""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To one GraphQL request."""
        match = re.search(r"(?:query|mutation)\s+(\w+)", query)
        known = self.history.get(str(variables.get("name")), [])
        project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "r", "name": variables.get("name"), "displayName": "a run", "config": "{}", "project": project}
        if match and match[1] == "UpsertBucket":
            self.config |= json.loads(variables.get("config") or "{}")
        answers: dict[str, dict[str, Any]] = {
            "Viewer": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
            "RunResumeStatus": {"model": {**project, "bucket": {**bucket, **_progress(known)} if known else None}},
            "UpsertBucket": {"upsertBucket": {"inserted": not known, "bucket": {**bucket, **_progress(known)}}},
            "CreateRunFiles": {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": self._places(variables)}},
            "ArtifactType": {"project": None},
            "CreateArtifact": {"createArtifact": {"artifact": {"id": "a", "state": "COMMITTED", **_LATEST}}},
        }
        return answers.get(match[1], {}) if match else {}

    def _places(self, variables: dict[str, Any]) -> list[dict[str, str]]:
        return [{"name": name, "uploadUrl": f"{self.address}/{name}"} for name in variables.get("files", [])]

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        """What a client sends while a run goes on, each line with its place."""
        content = sent.get("files", {}).get("wandb-history.jsonl")
        if content:
            lines = self.history.setdefault(run, [])
            lines[content["offset"] :] = [json.loads(line) for line in content["content"]]
        if sent.get("complete"):
            self.exit_codes.setdefault(run, []).append(sent["exitcode"])


_LATEST = {"artifactSequence": {"id": "s", "latestArtifact": {"id": "a", "versionIndex": 0}}}


def _progress(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """How far a run got: its client goes on from there."""
    counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]"}
    held = {"summaryMetrics": "{}", "historyTail": json.dumps([json.dumps(line) for line in lines[-1:]])}
    return {**counts, **held, "projectId": "1", "tags": [], "wandbConfig": json.dumps({"t": 1})}


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_GET(self) -> None:
        self._body()
        self._reply({})

    do_PUT = do_GET  # noqa: N815

    def do_POST(self) -> None:
        body = self._body()
        if self.server.away:
            self._reply({}, status=503)
            return
        if self.path.endswith("/graphql"):
            request = json.loads(body)
            self._reply({"data": self.server.answer(request["query"], request.get("variables") or {})})
            return
        if self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body))
        self._reply({})

    def log_message(self, *args: object) -> None: ...

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
