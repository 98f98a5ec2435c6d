"""The page of a run that goes on, served on this machine alone.

It is drawn again where it is asked for and the record has grown, at most once in a while.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from lockstep.errors import LockstepError, SettingError
from lockstep.extensions.report.page import render
from lockstep.extensions.report.reading import Record

ADDRESS = "127.0.0.1"
_REFRESH_S = 5.0
_OLD_S = 60.0
"""A page that is older is drawn again though nothing was added: it says for how long that is so."""
_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class LivePage:
    """The page as it is now.

    Args:
        record: of the run; read again here.
        baselines: of other runs.
    """

    def __init__(self, record: Record, baselines: Sequence[Record] = ()) -> None:
        self._record, self._baselines = record, baselines
        self._lock = threading.Lock()
        self._text, self._until, self._old_from = "", 0.0, 0.0

    def text(self) -> str:
        """The page; drawing it takes seconds of a core, which the training may need too."""
        with self._lock:
            begun = time.monotonic()
            if begun >= self._until:
                if self._record.refresh() or begun >= self._old_from:
                    self._old_from = begun + _OLD_S
                    self._text = render(self._record, self._baselines, refresh_s=_REFRESH_S)
                took = time.monotonic() - begun
                self._until = time.monotonic() + max(_REFRESH_S / 2, 10 * took)
            return self._text


def make_server(page: LivePage, port: int = 0) -> ThreadingHTTPServer:
    """A server of the page on loopback; the caller runs and closes it.

    Args:
        page: what it serves.
        port: 0: any.

    Raises:
        SettingError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the browser has gone
                super().handle()

        def do_GET(self) -> None:
            # Another name for this address may be a foreign page's, which would read the answer.
            if not _NAMES.fullmatch(self.headers.get("Host") or ""):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if urlsplit(self.path).path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            try:
                body = page.text().encode()
            except LockstepError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error.parts))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing of requests."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise SettingError(
            f"--port {port}", f"{ADDRESS} cannot be listened on: {error}", "choose another, or 0"
        ) from error
    server.daemon_threads = True
    return server


def serve(
    record: Record, baselines: Sequence[Record], port: int, say: Callable[[str], object]
) -> None:
    """Serves the page until Ctrl-C.

    Args:
        record: of the run.
        baselines: of other runs.
        port: 0: any.
        say: called with where it is.

    Raises:
        SettingError: the port is taken, or matplotlib is not installed.
    """
    page = LivePage(record, baselines)
    page.text()  # what stands against it is heard now
    with make_server(page, port) as server:
        say(f"http://{ADDRESS}:{server.server_port}/ on this machine alone; Ctrl-C ends it")
        server.serve_forever(poll_interval=0.2)
