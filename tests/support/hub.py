"""A hub on this machine: as much of the protocol as it takes to load models and datasets from it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "c0ffee" + 34 * "0"  # the only revision of everything
RENAMED = {"bert-base-uncased": "google-bert/bert-base-uncased"}  # the hub sends on who asks by an old name


@dataclass
class Hub:
    """Serves ``root/models/<owner>/<name>`` and ``root/datasets/<owner>/<name>``.

    Attributes:
        handed_out: The files that were taken, ``<owner>/<name>/<file>``.
    """

    root: Path
    url: str = ""
    handed_out: set[str] = field(default_factory=set)


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    """Opens the hub at a free port."""
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False  # so that closing waits for them
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers each question on a connection of its own."""

    hub: Hub

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        match unquote(urlparse(self.path).path).strip("/").split("/"):
            case [name, "resolve", *_] | ["api", _, name, "revision" | "tree", *_] | ["api", _, name]:
                self._send(307, Location=self.path.replace(name, RENAMED.get(name, "nobody/nothing"), 1))
            case ["api", "models" | "datasets" as kind, owner, name, *question]:
                self._tell(self.hub.root / kind / owner / name, f"{owner}/{name}", question, body)
            case ["datasets", owner, name, "resolve", _, *file]:
                self._hand_out("datasets", f"{owner}/{name}", "/".join(file))
            case [owner, name, "resolve", _, *file]:
                self._hand_out("models", f"{owner}/{name}", "/".join(file))
            case _:
                self._send(404)

    def _tell(self, folder: Path, name: str, question: list[str], body: bytes) -> None:
        """What lies in a repository."""
        match question:
            case _ if not folder.is_dir():
                self._send(404, **{"X-Error-Code": "RepoNotFound"})
            case [] | ["revision", *_]:
                siblings = [{"rfilename": str(p.relative_to(folder))} for p in folder.rglob("*") if p.is_file()]
                self._send_json({"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings})
            case ["tree", _, *inner] if (folder / "/".join(inner)).is_dir():
                self._send_json([_entry(folder, path) for path in sorted((folder / "/".join(inner)).iterdir())])
            case ["paths-info", _]:
                asked = parse_qs(body.decode())["paths"]
                self._send_json([_entry(folder, folder / path) for path in asked if (folder / path).exists()])
            case _:
                self._send(404, **{"X-Error-Code": "EntryNotFound"})

    def _hand_out(self, kind: str, repository: str, name: str) -> None:
        file = self.hub.root / kind / repository / name
        if not (self.hub.root / kind / repository).is_dir():
            self._send(404, **{"X-Error-Code": "RepoNotFound"})
        elif not file.is_file():
            self._send(404, **{"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"})
        else:
            if self.command == "GET":
                self.hub.handed_out.add(f"{repository}/{name}")
            content = file.read_bytes()
            self._send(200, content, **{"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    content = path.read_bytes()
    return {"type": "file", "oid": _digest(content), "size": len(content), "path": name}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
