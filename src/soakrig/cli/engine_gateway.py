"""``soak engine gateway``: stands between clients and an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from soakrig.cli.engine_serving import RegistryFile
from soakrig.cli.output import emit_json
from soakrig.errors import UsageError
from soakrig.reports.terminal import report_console
from soakrig.soak.target import parse_url

DEFAULT_PORT = 8090


def gateway(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Models of the registry, with their policies; all of them where no engine is named.",
                       metavar="[MODEL]...", show_default=False),
    ] = None,
    upstream: Annotated[
        str,
        typer.Option(help="The engine: base URL of an OpenAI-compatible server. It gets what names no other."),
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A further engine, by the name that clients use; may be given again."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Turn a policy on; may be given again. All are off by default. For "
                     "engines given by URL: a model of the registry has its own."),
    ] = None,
    registry: RegistryFile = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a key.")] = "127.0.0.1",
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the key which clients have to send.")
    ] = "",
    upstream_api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable that holds the key which the engine wants.")
    ] = "",
    capture: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for exchanges (with --policy capture): a ring of 64 files, 0600."),
    ] = None,
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds of silence in the middle of an answer that end it with an error.")
    ] = 120.0,
    first_byte_timeout: Annotated[
        float, typer.Option(help="Most seconds until an answer begins, while the engine answers /health.")
    ] = 1800.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (url, engines, policies) once it listens.")
    ] = False,
) -> None:  # fmt: skip
    """Stand between clients and an engine: say plainly when it is dead, and repair what clients leave out.

    \b
    Examples:
      soak engine gateway                   the models of the registry, whichever of them serves
      soak engine gateway glm53 embedded    these, and no other
      soak engine gateway --upstream http://127.0.0.1:8000
      soak engine gateway --upstream http://127.0.0.1:8000 --policy restore_reasoning
      soak engine gateway --upstream http://127.0.0.1:8000 --policy min_output_tokens=8192 --policy sanitize_tool_tags
      soak engine gateway --upstream http://127.0.0.1:8000 --policy 'presets={"glm-low": {"reasoning_effort": "low"}}'

    Models of the registry may start, stop and be switched meanwhile. Without a policy, requests and answers pass byte
    for byte. Runs until Ctrl-C.
    """
    from soakrig.engine.gateway import server
    from soakrig.engine.gateway.app import Gateway
    from soakrig.engine.gateway.capture import Captures
    from soakrig.engine.gateway.policies import parse_policies
    from soakrig.engine.gateway.proxy import Waits
    from soakrig.engine.gateway.upstream import Upstream
    from soakrig.engine.registry import load_registry
    from soakrig.engine.served_upstreams import served_upstreams
    from soakrig.engine.serving.folder import engines_folder

    by_url = bool(upstream or model)
    if by_url and models:
        raise UsageError(
            f"the models {', '.join(models)} are of the registry, and --{'upstream' if upstream else 'model'} names an "
            "engine by its URL",
            remedy="Give the one or the other.",
        )
    if policy and not by_url:
        raise UsageError(
            "--policy is for engines given by URL",
            remedy="A model of the registry has its policies in its table: [models.NAME.policies].",
        )
    policies = parse_policies(policy or [])
    for name, seconds in (("--stall-timeout", stall_timeout), ("--first-byte-timeout", first_byte_timeout)):
        if not 0 < seconds < 1e9:
            raise UsageError(f"{name} {seconds:g}: expected a number above 0")
    key, upstream_key = _key("--api-key-env", api_key_env), _key("--upstream-api-key-env", upstream_api_key_env)
    server.check_host(host, key)
    known = load_registry(registry) if not by_url else None
    served = served_upstreams(known, models or known.models, engines_folder()) if known is not None else {}
    captured = [name for name, one in served.items() if one.policies.capture]
    if capture is not None and not (policies.capture or captured):
        where = "--policy capture" if by_url else "the policy `capture = true` of a model in the registry"
        raise UsageError(f"--capture writes nothing without {where}", remedy="Give both, or neither.")
    default = Upstream("upstream", parse_url(upstream), policies, api_key=upstream_key) if upstream else None
    named: dict[str, Upstream] = dict(served)
    # Aliases stand for one engine's model: the default one's, where there is one.
    further = policies.model_copy(update={"presets": {}}) if default is not None else policies
    for text in model or []:
        name, equals, url = text.partition("=")
        if not (name and equals):
            raise UsageError(f"--model {text!r}: expected NAME=URL", remedy="As in --model qwen=http://127.0.0.1:8001.")
        if name in named:
            raise UsageError(f"--model {name} is given twice", remedy="Give every engine a name of its own.")
        named[name] = Upstream(name, parse_url(url), further, api_key=upstream_key)
    captures = Captures(capture) if capture is not None else None
    waits = Waits(stall_timeout, max(first_byte_timeout, stall_timeout))
    standing = Gateway(default, named, waits=waits, api_key=key, captures=captures)
    listener = server.bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"
    notes = report_console(stderr=True)
    engines = {one.name: one.url for one in standing.catalogue.upstreams}
    if known is not None:
        engines = dict.fromkeys(engines, "wherever it serves")
    on = policies.model_dump(exclude_defaults=True)
    own = {one.name: one.policies.model_dump(exclude_defaults=True) for one in served.values()}

    def ready() -> None:
        if as_json:
            told = own if known is not None else on
            emit_json({"url": url, "engines": engines, "policies": told, "capture": str(capture) if capture else None})
        behind = ", ".join(f"{name} at {where}" for name, where in engines.items())
        if known is not None:
            behind = f"{', '.join(engines)}, whichever serves"
        notes.print(f"gateway on {url}, behind it {behind}", markup=False)
        for name, table in own.items() if known is not None else (("", on),):
            of = f" of {name}" if name else ""
            notes.print(f"policies{of}: {', '.join(table) or 'none, everything passes byte for byte'}", markup=False)
        if policies.capture or captured:
            where = f"exchanges go to {capture}" if capture else "no --capture folder, so that nothing is written"
            notes.print(f"capture: {where}", markup=False)

    server.run(standing, listener, ready)


def _key(option: str, variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise UsageError(f"{option} {variable}: the variable is not set", remedy="Export it first.")
    return key
