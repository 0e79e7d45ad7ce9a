"""A run folder in whose prompts, settings, events and logs the thirty secrets stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from builders import T0, dead, done, ended, kernel_live, sent, source, xid
from run_folders import write_case, write_run
from seeded_secrets import PROMPTS, SECRETS, engine_lines, kernel_lines
from soakrig.record.events import Event, Note
from soakrig.record.request_log import RequestLog

HEAD = orjson.dumps(
    {
        "model": SECRETS["data path"],
        "max_tokens": 64,
        "stream": True,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "read_file",
                    "description": f"Reads a file of {SECRETS['user']} below {SECRETS['home']} and gives it whole.",
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
            }
        ],
    }
)[:-1]


class _Lines:
    """Takes what a request log writes, and puts it into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_lines(self, name: str, lines: list[bytes]) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as stream:
            stream.write(b"\n".join(lines) + b"\n")


def messages() -> list[bytes]:
    """A conversation of three turns, every secret in it."""
    told = "; ".join(f"{what} is {secret}" for what, secret in SECRETS.items())
    said = [
        {"role": "user", "content": PROMPTS[0]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": {
            "name": "read_file", "arguments": orjson.dumps({"path": SECRETS["home"], "note": told}).decode()}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": told},
        {"role": "assistant", "content": f"Done, {SECRETS['user']}."},
        {"role": "user", "content": f"{PROMPTS[1]}. {told}"},
    ]  # fmt: skip
    return [orjson.dumps(one) for one in said]


def write_requests(folder: Path) -> None:
    """``requests/`` of three turns."""
    log = RequestLog(_Lines(folder))  # type: ignore[arg-type]
    said = messages()
    for turn, count in ((1, 1), (2, 3), (3, 5)):
        body = HEAD + b',"messages":[' + b",".join(said[:count]) + b'],"seed":7}'
        log.sent(0, turn, 0, HEAD, said[:count], {"seed": 7}, body)


def events() -> list[Event]:
    """Two good turns, and a third in which a device fault kills the engine."""
    s = SECRETS
    fault = xid(31, T0 + 5.2, raw=f"Nov 29 15:04:35 {s['host']} kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=x")
    fault.signal.detail |= {"uuid": s["GPU UUID"], "serial": s["GPU serial"], "machine_id": s["machine id"]}
    why = f"status 500: {{'message': 'worker of {s['user']} at {s['home']} died, key {s['OpenAI']}'}}"
    return [
        kernel_live(),
        source("engine_log", "live", f"follows {s['home']} on {s['domain name']}"),
        Note(T0, T0, f"told by {s['mail']}: {PROMPTS[0]}"),
        sent(1, T0 + 1), done(1, T0 + 2),
        sent(2, T0 + 3), done(2, T0 + 4),
        sent(3, T0 + 5), fault, done(3, T0 + 6, "http_error", status=500, why=why),
        dead(T0 + 7, 3, how=f"no process of {s['other user']}", status=-9),
        ended(T0 + 8, "fault", f"{s['IPv4']} and {s['IPv6']} went away"),
    ]  # fmt: skip


def seeded_run(folder: Path, **fields: Any) -> Path:
    """The folder, written."""
    s = SECRETS
    settings = {
        "set": {"HF_HOME": s["data path"], "HF_TOKEN": s["Hugging Face"], "MASTER_ADDR": s["IPv4"]},
        "args": [f"--api-key={s['OpenAI']}", f"--model={s['data path']}", f"--log={s['home on a Mac']}"],
        "engine": {"settings": {"WANDB": {"value": s["W&B"], "source": "environment"}}, "owner": s["mail of another"]},
    }
    fields = {"settings": settings, "host": {"boot_id": s["GPU UUID"][4:], "hostname": s["host"]}, **fields}
    write_run(folder, events(), base_url=f"http://{s['domain name']}:8000", model=s["data path"], **fields)
    write_requests(folder)
    log = "\n".join(engine_lines())
    write_case(folder, "01-xid", T0 + 5.2, log, messages=[{"role": "user", "content": PROMPTS[1]}])
    (folder / "kernel.log").write_text("\n".join([*kernel_lines(), events()[8].signal.raw]) + "\n")  # type: ignore[union-attr]
    (folder / "engine.log").write_text(log + "\n")
    return folder
