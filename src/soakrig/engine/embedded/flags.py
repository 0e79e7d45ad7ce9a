"""The command line of ``python -m soakrig.engine.embedded``."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from soakrig.errors import UsageError

from .config import EngineConfig


@dataclass(frozen=True, slots=True)
class Flags:
    """Where to listen (always 127.0.0.1; port 0 takes a free one), and the engine's configuration."""

    port: int
    port_file: Path | None
    config: EngineConfig


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy="python -m soakrig.engine.embedded --help lists the flags")


def parse_flags(argv: list[str]) -> Flags:
    """Raises UsageError for an unknown flag (with the nearest known one) or a value that makes no sense."""
    parser = _build()
    known, rest = parser.parse_known_args(argv)
    if rest:
        flags = [name for action in parser._actions for name in action.option_strings]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        near = difflib.get_close_matches(rest[0].partition("=")[0], flags, n=1)
        remedy = f"{near[0]} was probably meant" if near else "--help lists the flags"
        raise UsageError(f"{rest[0]} is no flag of the embedded engine", remedy=remedy)
    values = dict(vars(known))
    port, port_file = values.pop("port"), values.pop("port_file")
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is no port; 0 to 65535 was expected")
    if port_file is not None and not port_file.absolute().parent.is_dir():
        raise UsageError(f"--port-file {port_file}: its folder does not exist", remedy="create the folder first")
    values["prefix_cache"] = not values.pop("no_prefix_cache")
    return Flags(port, port_file, EngineConfig(**values))


def _build() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m soakrig.engine.embedded", allow_abbrev=False, description=__doc__)
    d = EngineConfig()

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default {default})")

    number("--port", 0, "port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="file that gets the port once the engine is ready")
    parser.add_argument("--served-model-name", default=d.served_model_name, help=f"default {d.served_model_name}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=d.device, help=f"default {d.device}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=d.dtype, help=f"default {d.dtype}")
    number("--layers", d.layers, "decoder layers")
    number("--experts", d.experts, "routed experts of a layer")
    number("--top-k", d.top_k, "experts a token goes to")
    number("--hidden", d.hidden, "width of the model, a multiple of 64")
    number("--weights-seed", d.weights_seed, "seed of the weights")
    number("--max-model-len", d.max_model_len, "tokens of prompt and reply together")
    number("--kv-tokens", d.kv_tokens, "budget of the KV cache in tokens")
    number("--block-size", d.block_size, "tokens of a KV block")
    number("--max-num-seqs", d.max_num_seqs, "requests in a step")
    number("--max-num-batched-tokens", d.max_num_batched_tokens, "tokens in a step")
    number("--threads", d.threads, "threads of the model; 0: all CPUs, at most 4")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    return parser
