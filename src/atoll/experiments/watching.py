"""watch(): the page of a run or a comparison, served while it goes on.

The server listens on this machine only, answers two addresses, and reads the folder as `atoll report` does: it writes
nothing, and the run need not know of it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from markupsafe import escape

from atoll.experiments.comparison import Comparison, read_runs
from atoll.kernel.errors import AtollError, RunError
from atoll.report.html import render_page

HOST = "127.0.0.1"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
FILES = ("comparison.json", "config.json", "metrics.jsonl")

log = logging.getLogger("atoll.experiments.watching")


class Watched:
    """The folder of a run or a comparison, and its page as far as it has got."""

    def __init__(self, folder: Path | str, *, trust: bool = False) -> None:
        self.folder, self.trust = Path(folder), trust
        if not any((self.folder / name).exists() for name in FILES[:2]):
            raise RunError(
                f"There must be a run or a comparison to watch. {self.folder} holds neither.",
                hint="begin one with `out` set to this folder, or give the folder that it says.",
            )
        self._lock = threading.Lock()
        self._page = self._of = ""

    @property
    def version(self) -> str:
        """A digest that changes whenever a run has got further."""
        found = hashlib.sha256()
        for path in sorted(path for name in FILES for path in [self.folder / name, *self.folder.glob(f"*/{name}")]):
            if path.exists():
                facts = path.stat()
                found.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        return found.hexdigest()[:16]

    def page(self) -> str:
        """Return the page of now; rendered again only if a run has got further."""
        with self._lock:
            version = self.version
            if version != self._of:
                try:
                    self._page, self._of = self._render(), version
                except (AtollError, OSError) as error:  # it may be in the middle of writing: the next look will tell
                    log.info("%s: %s", self.folder, error)
                    self._page = self._page or _write_waiting(self.folder, str(error))
            return self._page

    def _render(self) -> str:
        runs, absent = read_runs(self.folder, trust=self.trust)
        if not any(run.evaluations for run in runs):
            done = ", ".join(f"{run.label} with seed {run.seed}: {run.progress}" for run in runs)
            return _write_waiting(self.folder, done or "No run has begun yet.")
        comparison = Comparison.of_runs(runs, absent=absent)
        over = not comparison.missing and all(run.finished for run in runs)
        words = "All runs are finished." if over else "This page follows the run and reloads by itself."
        return render_page(comparison, following=words)


def serve(folder: Path | str, *, port: int = 0, trust: bool = False) -> Server:
    """Return a server of the page, ready to `serve_forever()`; port 0 takes a free one."""
    watched = Watched(folder, trust=trust)
    try:
        return Server(watched, port)
    except OSError as error:
        raise RunError(
            f"The page must have a port of its own. {HOST}:{port} cannot be used: {error.strerror or error}.",
            hint="choose another `port`, or 0 for one that is free.",
        ) from error


class Server(ThreadingHTTPServer):
    """Serves one page on this machine."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int) -> None:
        self.watched = watched
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer with the page, or with its version."""
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", self.server.watched.page),
            "/version": ("text/plain", lambda: self.server.watched.version),
        }
        # A page of another site may name this machine as its own; then it is not asked for by this name.
        named = (self.headers.get("Host") or "").rpartition(":")[0]
        if named not in (HOST, "localhost"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        if self.path not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, make = answers[self.path]
        content = make().encode()
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        """Log requests as everything else is logged."""
        log.debug(format, *arguments)


def _write_waiting(folder: Path, words: str) -> str:
    """Write a page for a run that has nothing to show yet."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Waiting · Atoll</title>'
        "<style>:root{color-scheme:light dark}body{font:16px/1.6 system-ui,sans-serif;margin:3rem auto;max-width:40rem;"
        "padding:0 1rem}</style></head><body><h1>Waiting for the first scores</h1>"
        f'<p>{escape(folder)}</p><p role="status">{escape(words)}</p></body></html>'
    )
