"""``soak engine``: the bundled engines and what they serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soakrig.cli import engine_gateway, engine_serving
from soakrig.cli.output import emit, emit_json

app = typer.Typer(no_args_is_help=True, help="Serve models of the registry on this machine, and make a tiny one.")
app.command("list")(engine_serving.list_models)
app.command("preflight")(engine_serving.preflight)
app.command("serve")(engine_serving.serve)
app.command("stop")(engine_serving.stop)
app.command("status")(engine_serving.status)
app.command("logs")(engine_serving.logs)
app.command("switch")(engine_serving.switch)
app.command("gateway")(engine_gateway.gateway)


@app.command("make-tiny")
def make_tiny(
    directory: Annotated[Path, typer.Argument(help="Folder to write the checkpoint to; new or empty.", metavar="DIR")],
    family: Annotated[str, typer.Option(help="qwen3-moe, or glm4-moe with a shared expert.")] = "qwen3-moe",
    layers: Annotated[int, typer.Option(help="Layers with routed experts.")] = 4,
    experts: Annotated[int, typer.Option(help="Routed experts of a layer.")] = 32,
    top_k: Annotated[int, typer.Option("--top-k", help="Experts that a token is routed to.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 64.")] = 128,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Write over the checkpoint in a folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a random mixture-of-experts model that stock vLLM serves: a few MB, in seconds, nothing downloaded."""
    # Here, not above: it loads torch, which no other verb has to wait for.
    from soakrig.engine.vllm import tiny
    from soakrig.engine.vllm.tiny_spec import TinySpec

    spec = TinySpec(family=family, layers=layers, experts=experts, top_k=top_k, hidden=hidden, seed=seed, dtype=dtype)
    made = tiny.make_tiny(directory, spec, force=force)
    if as_json:
        emit_json(made)
        return
    megabytes = sum(made["files"].values()) / 1e6
    emit(
        f"{directory}: {family}, {layers} layers of {experts} experts (top-{top_k}), "
        f"{made['parameters'] / 1e6:.1f} million parameters, {megabytes:.1f} MB"
    )
