"""Train the embedded engine's byte-level BPE tokenizer and write it into the package.

    python scripts/train_tokenizer.py [OUT]

The corpus is what every machine with Python has: the standard library's sources, and JSON made here (tool definitions,
tool calls, tool results). The shipped file was trained once; run this again only to change the vocabulary, since every
token id, and so every reply of the engine, changes with it.
"""

from __future__ import annotations

import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
OUT = Path(__file__).parent.parent / "src/soakrig/engine/embedded/tokenizer.json"
STDLIB_BYTES = 12_000_000
JSON_DOCUMENTS = 4_000

# Letters with one leading space, up to three digits, runs of punctuation, runs of space: short pieces that merge well.
SPLIT = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


VERBS = words(
    "read write edit search list run create delete move copy fetch open close apply check build test find replace"
)
NOUNS = words(
    "file directory process command branch commit issue page symbol reference test container image query table "
    "record log metric trace patch diff workspace terminal package dependency url request response session user"
)
FIELDS = words(
    "path pattern content query limit offset recursive command timeout_ms line_start line_end encoding name url method "
    "headers body branch message include exclude max_results case_sensitive language old_string new_string cwd env"
)
PHRASES = (
    "Absolute path of the file to read",
    "The number of lines to return; the whole file when left out",
    "Regular expression to search for",
    "Glob pattern to filter files, for example **/*.py",
    "Maximum number of results to return",
    "Whether to search in subdirectories as well",
    "Shell command to run in the workspace",
    "Time limit in milliseconds; the command is stopped when it is over",
    "Text to write; replaces what is there",
    "One sentence that says what the change does",
    "Exact text to replace, with its white space",
    "Name of the branch, tag or commit to compare with",
    "Returns the output, the exit status and the time it took",
    "Use this tool when the location of a symbol is not known",
    "Do not use it for files larger than one megabyte",
)


def stdlib_sources() -> Iterator[str]:
    """The standard library's modules in path order, up to ``STDLIB_BYTES`` in all."""
    root = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        if total > STDLIB_BYTES:
            return
        yield text


def property_schema(rng: random.Random) -> dict[str, object]:
    kind = rng.choice(["string", "string", "string", "integer", "number", "boolean", "array", "enum"])
    described: dict[str, object] = {"description": rng.choice(PHRASES) + "."}
    if kind == "enum":
        return {"type": "string", "enum": rng.sample(VERBS, 3), **described}
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}, "minItems": 1, **described}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.choice([10, 100, 1000, 65535]), **described}
    return {"type": kind, **described}


def tool(rng: random.Random) -> dict[str, object]:
    names = rng.sample(FIELDS, rng.randint(1, 6))
    return {
        "type": "function",
        "function": {
            "name": f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}",
            "description": " ".join(phrase + "." for phrase in rng.sample(PHRASES, rng.randint(1, 3))),
            "parameters": {
                "type": "object",
                "properties": {name: property_schema(rng) for name in names},
                "required": names[: rng.randint(1, len(names))],
                "additionalProperties": False,
            },
        },
    }


def listing(rng: random.Random) -> str:
    lines = [
        f"-rw-r--r-- 1 root root {rng.randint(100, 99999):>6} Nov {rng.randint(1, 29):>2} {rng.randint(0, 23):02d}:"
        f"{rng.randint(0, 59):02d} {rng.choice(NOUNS)}_{rng.choice(FIELDS)}.{rng.choice(['py', 'ts', 'json', 'md'])}"
        for _ in range(rng.randint(3, 15))
    ]
    return "\n".join(lines)


def log(rng: random.Random) -> str:
    levels = ["INFO", "WARNING", "ERROR", "DEBUG"]
    lines = [
        f"2025-11-{rng.randint(1, 29):02d}T{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:07.000Z "
        f"{rng.choice(levels)} [{rng.choice(NOUNS)}.{rng.choice(VERBS)}] {rng.choice(PHRASES).lower()}"
        for _ in range(rng.randint(3, 15))
    ]
    return "\n".join(lines)


def made_json(rng: random.Random, count: int) -> Iterator[str]:
    """Tool definitions, calls and results, compact and indented."""
    for _ in range(count):
        definition = tool(rng)
        call = {"name": rng.choice(VERBS), "arguments": {name: rng.choice(PHRASES) for name in rng.sample(FIELDS, 2)}}
        yield json.dumps(definition, separators=(",", ":"))
        yield json.dumps(definition)
        yield json.dumps(call, separators=(",", ":"))
        if rng.random() < 0.2:
            yield json.dumps(definition, indent=2)
        yield rng.choice([listing, log])(rng)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )

    def corpus() -> Iterator[str]:
        yield from stdlib_sources()
        yield from made_json(random.Random(0), JSON_DOCUMENTS)  # noqa: S311

    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    tokenizer = train()
    if tokenizer.get_vocab_size() != VOCABULARY:
        sys.exit(f"the corpus gave {tokenizer.get_vocab_size()} pieces, {VOCABULARY} are needed; feed more text")
    tokenizer.save(str(out), pretty=False)
    sys.stdout.write(f"{out}: {VOCABULARY} pieces, {out.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
