"""What a tool returns: file listings, code, diffs, logs, of varied length, made up from a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

_NOUNS = [
    "cache",
    "index",
    "worker",
    "queue",
    "parser",
    "router",
    "session",
    "token",
    "batch",
    "buffer",
    "shard",
    "config",
    "record",
    "stream",
    "layer",
]
_VERBS = [
    "load",
    "merge",
    "flush",
    "split",
    "build",
    "apply",
    "check",
    "fetch",
    "drain",
    "encode",
    "resolve",
    "update",
    "commit",
    "release",
    "expand",
]
_EXTENSIONS = ["py", "py", "py", "toml", "md", "json", "ts", "yaml", "sh"]
_FOLDERS = ["src", "src/core", "src/api", "tests", "tests/unit", "docs", "scripts", "config"]
_LEVELS = ["DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR"]


def path(rng: Random) -> str:
    """A path of an invented workspace."""
    return f"{rng.choice(_FOLDERS)}/{rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}.{rng.choice(_EXTENSIONS)}"


def task(rng: Random) -> str:
    """What a user asks for."""
    verb, noun, other = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_NOUNS)
    where = path(rng)
    return rng.choice(
        [
            f"The {noun} is wrong after we {verb} the {other}. Find out why in {where}, fix it and add a test.",
            f"Please {verb} the {noun} before the {other} in {where}, and keep the public names as they are.",
            f"{where} has grown too long. Move what belongs to the {noun} into a file of its own and run the tests.",
            f"Why does {verb}_{noun} take {rng.randint(2, 40)} s since the {other} came in? See {where}.",
        ]
    )


def follow_up(rng: Random) -> str:
    """What a user says next."""
    noun = rng.choice(_NOUNS)
    return rng.choice(
        [
            f"Go on, and look at the {noun} as well.",
            f"That is not it: the {noun} still comes out empty. Read {path(rng)} again.",
            "Good. Now the tests, please.",
            f"Stop there and explain what {rng.choice(_VERBS)}_{noun} does with {rng.randint(2, 99)} entries.",
        ]
    )


def result_of(tool: str, rng: Random, *, scale: float = 1.0) -> str:
    """The text that ``tool`` returns; about 150 to 900 characters at ``scale`` 1, mostly short."""
    length = int(scale * min(900.0, 140.0 * rng.paretovariate(1.6)))
    for words, make in _MAKERS:
        if any(word in tool for word in words):
            return make(rng, length)
    return _log(rng, length)


def _until(length: int, line: Callable[[int], str]) -> str:
    lines: list[str] = []
    size = 0
    while size < length or not lines:
        lines.append(line(len(lines)))
        size += len(lines[-1]) + 1
    return "\n".join(lines)


def _listing(rng: Random, length: int) -> str:
    def line(_: int) -> str:
        return f"-rw-r--r-- {rng.randint(200, 90_000):>6} {rng.choice(_NOUNS)}_{rng.choice(_NOUNS)}.py"

    return _until(length, line)


def _code(rng: Random, length: int) -> str:
    def line(n: int) -> str:
        a, b, verb = rng.choice(_NOUNS), rng.choice(_NOUNS), rng.choice(_VERBS)
        return rng.choice(
            [
                f"def {verb}_{a}({b}: {b.title()}, limit: int = {rng.randint(1, 512)}) -> {a.title()}:",
                f"    if {b}.{verb} is None and len({a}) > {rng.randint(1, 99)}:",
                f"        raise {a.title()}Error(f'{{{b}}} cannot {verb} at {n}')",
                f"    {a} = {verb}_{b}({a}, {rng.randint(0, 4096)})",
                f"    return {a}[{rng.randint(0, 9)}:{rng.randint(10, 99)}]",
            ]
        )

    return _until(length, line)


def _diff(rng: Random, length: int) -> str:
    name = path(rng)
    start = rng.randint(1, 400)
    head = f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -{start},9 +{start},11 @@\n"
    body = _code(rng, max(40, length - len(head)))
    return head + "\n".join(rng.choice([" ", " ", "+", "-"]) + line for line in body.splitlines())


def _log(rng: Random, length: int) -> str:
    def line(n: int) -> str:
        at = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{n % 60:02}.{rng.randint(0, 999):03}"
        what = f"{rng.choice(_VERBS)} {rng.choice(_NOUNS)} id={rng.randint(1, 99_999)} took={rng.randint(1, 900)}ms"
        return f"{at} {rng.choice(_LEVELS)} {rng.choice(_NOUNS)}: {what}"

    return _until(length, line)


def _tests(rng: Random, length: int) -> str:
    failed = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    got, want = rng.randint(0, 99), rng.randint(100, 199)
    tail = f"FAILED tests/unit/test_{failed}.py::test_{failed} - assert {got} == {want}\n"
    return tail + _log(rng, max(40, length - len(tail))) + f"\n1 failed, {rng.randint(3, 240)} passed"


def _matches(rng: Random, length: int) -> str:
    def line(_: int) -> str:
        code = f"{rng.choice(_NOUNS)}.{rng.choice(_VERBS)}({rng.choice(_NOUNS)})"
        return f"{path(rng)}:{rng.randint(1, 900)}: {code}"

    return _until(length, line)


def _rows(rng: Random, length: int) -> str:
    columns = rng.sample(_NOUNS, 4)

    def line(n: int) -> str:
        if n == 0:
            return " | ".join(columns)
        return " | ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in columns)

    return _until(length, line)


_MAKERS: list[tuple[tuple[str, ...], Callable[[Random, int], str]]] = [
    (("list_dir", "find_files", "packages"), _listing),
    (("diff", "show", "patch", "edit", "blame"), _diff),
    (("read_file", "definition", "outline", "docs"), _code),
    (("test", "coverage"), _tests),
    (("search", "references", "diagnostics", "symbol"), _matches),
    (("query", "table"), _rows),
]
