"""Serves the page of a run that is still running, to browsers on this machine only.

The page asks for its newest version every few seconds, and replaces what has changed
(`web/page.js`). The page is drawn again when the record of the run has grown, but not too often:
drawing keeps a core busy that the training may need too.
"""

from __future__ import annotations

import contextlib
import hashlib
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
REFRESH_S = 5.0
"""How often the page asks for changes."""
MAX_AGE_S = 60.0
"""A page older than this is drawn again even if the record has not grown: it tells how long ago
the record last grew."""
# The header `Host` of a request to this machine: localhost:8000, 127.0.0.1, [::1]:80.
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class LivePage:
    """The page of a record, drawn again as the record grows.

    Args:
        record: the record of the run, which is refreshed here.
        others: records of other runs to compare it with, which are refreshed too.
    """

    def __init__(self, record: Record, others: Sequence[Record] = ()) -> None:
        self._record = record
        self._others = others
        self._lock = threading.Lock()
        self._text = ""
        self._earliest_redraw_s = 0.0
        """Before this time of `time.monotonic`, the page is not drawn again."""
        self._latest_redraw_s = 0.0
        """From this time on, the page is drawn again even if no record has grown."""

    def text(self) -> str:
        """Returns the page. It is drawn again if a record has grown, but not too often.

        For example, a page that took 1 s to draw is kept for 10 s, whatever the records do. After
        that it is drawn again as soon as a record has grown, and after a minute in any case, since
        it says how long ago the record last grew.
        """
        with self._lock:
            begin_s = time.monotonic()
            if begin_s < self._earliest_redraw_s:
                return self._text

            records_have_grown = [record.refresh() for record in (self._record, *self._others)]
            is_too_old = begin_s >= self._latest_redraw_s
            if any(records_have_grown) or is_too_old:
                self._text = render(self._record, self._others, refresh_s=REFRESH_S)
                self._latest_redraw_s = begin_s + MAX_AGE_S

            # At most a tenth of the time is spent on reading and drawing.
            end_s = time.monotonic()
            spent_s = end_s - begin_s
            self._earliest_redraw_s = end_s + max(REFRESH_S / 2, 10 * spent_s)
            return self._text


def make_server(page: LivePage, port: int = 0) -> ThreadingHTTPServer:
    """Makes a server of the page on loopback; the caller runs and closes it.

    Args:
        page: the page.
        port: the port to listen on; 0 for any.

    Raises:
        SettingError: the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the browser has closed the connection
                super().handle()

        def do_GET(self) -> None:
            """Answers a request with the `page` that `make_server` was given, or an error."""
            # A foreign site could let its own name, such as evil.example, point to this address, to
            # read the answer in its visitor's browser (DNS rebinding). The browser then sends
            # "Host: evil.example", which is refused.
            if not _OWN_HOST.fullmatch(self.headers.get("Host") or ""):
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if urlsplit(self.path).path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return

            try:
                body = page.text().encode()
            except LockstepError as error:
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error.message))
                return

            # A page that has not changed is not sent again, which matters over ssh.
            tag = f'"{hashlib.sha256(body).hexdigest()}"'
            is_known = self.headers.get("If-None-Match") == tag
            self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
            self.send_header("ETag", tag)
            self.send_header("Cache-Control", "no-cache")  # ask each time whether it has changed
            if is_known:
                self.end_headers()
                return

            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Prints nothing about requests."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise SettingError(
            f"--port {port}", f"{ADDRESS} cannot be listened on: {error}", "choose another, or 0"
        ) from error

    server.daemon_threads = True
    return server


def serve(
    record: Record, others: Sequence[Record], port: int, say: Callable[[str], object]
) -> None:
    """Serves the page until Ctrl-C.

    Args:
        record: the record of the run.
        others: records of other runs to compare it with.
        port: the port to listen on; 0 for any.
        say: a function that is called with a line that names the page's address.

    Raises:
        SettingError: the port is taken.
    """
    page = LivePage(record, others)
    with make_server(page, port) as server:
        say(f"http://{ADDRESS}:{server.server_port}/ on this machine alone; Ctrl-C ends it")
        server.serve_forever(poll_interval=0.2)
