"""Messages by the real apprise, to real servers on this machine."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from soakrig.bisect.notify import LONGEST, Notifier
from soakrig.bisect.notify_child import without_url
from soakrig.errors import UsageError

SECRET = "s3cret-t0ken"


class Inbox(ThreadingHTTPServer):
    """Takes apprise's JSON messages; answers with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def url(self, rest: str = "") -> str:
        return f"json://127.0.0.1:{self.server_port}/{rest}"


class _Handler(BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.append(json.loads(body))
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Not on standard error."""


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def dead_end() -> Iterator[str]:
    """URL of a server that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield f"json://{SECRET}:{SECRET}@127.0.0.1:{server.getsockname()[1]}/{SECRET}?rto=60"


def test_a_message_arrives(inbox: Inbox) -> None:
    notifier = Notifier([inbox.url(SECRET)])
    notifier.check()
    assert inbox.messages == [], "a check sends nothing"
    title, body = "night-1: first fault", 'Xid 31 <b>&amp;</b> "quoted"\n*second* `line` \\n [red]é'
    assert notifier.send(title, body) == ""
    (message,) = inbox.messages
    assert (message["title"], message["message"]) == (title, body)
    assert inbox.paths == [f"/{SECRET}"]


def test_markup_of_a_log_is_inert_where_a_service_takes_html(inbox: Inbox) -> None:
    assert Notifier([inbox.url("?format=html")]).send("title", "<script>x</script>") == ""
    assert "<script>" not in inbox.messages[0]["message"]
    assert "&lt;script&gt;" in inbox.messages[0]["message"]


def test_no_url_no_message_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    notifier = Notifier([])
    notifier.check()
    assert notifier.send("title", "body") == ""


def test_text_that_is_no_utf8_and_a_very_long_one(inbox: Inbox) -> None:
    notifier = Notifier([inbox.url()])
    assert notifier.send("a log said \udcff", "\U0001f525" * 10 * LONGEST) == ""
    (message,) = inbox.messages
    assert message["title"] == "a log said ?"
    assert 0 < len(message["message"]) <= LONGEST
    assert set(message["message"]) == {"\U0001f525"}


def test_a_server_that_refuses_the_message(inbox: Inbox) -> None:
    inbox.status = 403
    why = Notifier([inbox.url(SECRET)]).send("title", "body")
    assert why.startswith("not notified: json://...: ")
    assert "403" in why
    assert SECRET not in why


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    why = Notifier([f"json://user:{SECRET}@127.0.0.1:{port}/{SECRET}"]).send("title", "body")
    assert why.startswith("not notified: json://...: A Connection error")
    assert SECRET not in why
    assert str(port) not in why


def test_a_server_that_never_answers_holds_nobody(dead_end: str) -> None:
    notifier = Notifier([dead_end], deadline=1.5)
    before = time.monotonic()
    assert notifier.send("title", "body") == "not notified: json://...: no answer within 1.5 s"
    assert 1.5 <= time.monotonic() - before < 3.0
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if children.exists():
        mine = [Path("/proc", pid, "cmdline").read_bytes() for pid in children.read_text().split()]
        assert not [line for line in mine if b"notify_child" in line]


def test_the_others_get_it_all_the_same(dead_end: str, inbox: Inbox) -> None:
    notifier = Notifier([dead_end, inbox.url(), "foo://bar"], deadline=5.0)
    why = notifier.send("title", "body")
    assert len(inbox.messages) == 1
    assert "json://... (number 1 of 3): no answer within 5 s" in why
    assert "foo://... (number 3 of 3): " in why
    assert "number 2" not in why


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"foo://{SECRET}/x", "foo://..."),
        (f"slack://{SECRET}", "slack://..."),
        ("json://", "json://..."),
        (SECRET, "a text without ://"),
        (f"{SECRET} ://x", "a text without ://"),
        ("", "a text without ://"),
        (f"json://127.0.0.1:9/{SECRET}, json://127.0.0.1:8", "json://..."),
    ],
)
def test_a_url_that_apprise_does_not_understand(url: str, shown: str) -> None:
    with pytest.raises(UsageError, match="is no URL that apprise can send to") as error:
        Notifier([url]).check()
    assert f"--notify: {shown} is no URL" in error.value.message
    assert SECRET not in str(error.value)
    assert error.value.remedy
    assert Notifier([url]).send("title", "body").startswith("not notified: ")


def test_the_bad_one_of_several_is_named(inbox: Inbox) -> None:
    with pytest.raises(UsageError, match=r"foo://\.\.\. \(number 2 of 2\)"):
        Notifier([inbox.url(), "foo://bar"]).check()


def test_without_apprise(tmp_path: Path, inbox: Inbox) -> None:
    (tmp_path / "apprise.py").write_text("raise ImportError(\"No module named 'apprise'\")")
    notifier = Notifier([inbox.url()], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    with pytest.raises(UsageError, match="needs apprise, which cannot be loaded: No module named 'apprise'") as error:
        notifier.check()
    assert error.value.remedy == "pip install 'soakrig[notify]'"
    assert "No module named 'apprise'" in notifier.send("title", "body")


@pytest.mark.parametrize(
    ("code", "why"),
    [("import os; os._exit(7)", "exit status 7"), ("raise RuntimeError('boom')", "RuntimeError: boom")],
)
def test_a_library_that_breaks(tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "apprise.py").write_text(code)
    notifier = Notifier(["json://127.0.0.1"], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert why in notifier.send("title", "body")
    with pytest.raises(UsageError, match=why):
        notifier.check()


def test_a_tool_that_cannot_start_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert Notifier([f"json://127.0.0.1/{SECRET}"]).send("title", "body") == "nobody was notified: FileNotFoundError"


def test_the_url_is_on_no_command_line(dead_end: str) -> None:
    """Everybody on the host can read those."""
    sending = threading.Thread(target=Notifier([dead_end], deadline=1.0).send, args=("title", "body"))
    sending.start()
    seen: set[bytes] = set()
    while sending.is_alive():
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = file.read_bytes()
            except OSError:
                continue
            if b"notify_child" in line:
                seen.add(line)
    assert seen
    assert not any(SECRET.encode() in line for line in seen)


@pytest.mark.parametrize(
    ("text", "url", "clean"),
    [
        ("Failed to reach example.com/hook/abc", "https://example.com/hook/abc?x=1", "Failed to reach ***/***/***"),
        ("bad token T0K%2FEN, that is T0K/EN", "tgram://T0K%2FEN/chat", "bad token ***, that is ***"),
        ("user bob, password pa55", "mailto://bob:pa55@host", "user ***, password ***"),
        ("two\nlines\x1b[31m", "json://h", "two lines [31m"),
        ("x" * 300, "json://h", "x" * 197 + "..."),
    ],
)
def test_parts_of_the_url_are_left_out(text: str, url: str, clean: str) -> None:
    assert without_url(text, url) == clean
