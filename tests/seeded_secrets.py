"""Thirty things that must not leave the house, made up, and the forms in which they would."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

HEX40 = "9f8e4c1d7a3b" + "5e6f0a1b2c3d4e5f60718293a4b5"
SECRETS = {
    "OpenAI": "sk-proj-" + "Ab9kQ2mX7vLp4RtZ8wYc3NdF6hJs1GeUqo5BiKyT",
    "Anthropic": "sk-ant-api03-" + "Zq8rT2nVb6MxK4pLs9WdYf3HgJc7AeRu1QiBoN5tEzXw0CvD",
    "Hugging Face": "hf_" + "QmZxTbNvRcLpKdJwHsGfYaEuIoPqWsXeCr",
    "GitHub": "ghp_" + "R4tY7uI9oP2aS5dF8gH1jK3lZ6xC0vB9nM2q",
    "GitHub fine": "github_pat_" + "11ABCDEFG0aBcDeFgHiJkL_" + "mN7oP8qR9sT0uV1wX2yZ3aB4cD5eF6gH7iJ8kL9mN0oP1q",
    "AWS": "AKIA" + "4HTQX7ZJ2WVN5KPB",
    "Google": "AIza" + "SyD8f3Jk2Lm9Qp7Rt6Vw5Xz4Bn1Hc0GyTeU",
    "Slack": "xoxb-" + "204857392011-839201847562-TqWxYzAbCdEfGhIjKlMnOpQr",
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmcCJGU4ZDk3YzRmLTVhNzEtNGE",
    "JWT": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiI4MTczNjQifQ.kR3vQ9xZ7mT2bN5cL8pW1dF4gH6jS0aY",
    "W&B": HEX40,
    "password": "Tr0ub4dor&3zebra",
    "database": "postgres-pw-lemur77",
    "bearer": "qv7Hs2kLw9Zp4Xn6Rb1T",
    "random": "k7Jx2Qz9Rm4Wv8Tn3Pb6Lc1Ys5Hd0Gf",
    "mail": "one.operatorq@acme-turbines.com",
    "mail of another": "oncall+gpu@hollow-reef.io",
    "home": "/home/oneoperatorq/work/turbine-twin/serve.sh",
    "home on a Mac": "/Users/twooperatorq/notes/secret-plan.md",
    "data path": "/srv/acme-turbines/checkpoints/twin-70b",
    "user": "oneoperatorq",
    "other user": "twooperatorq",
    "host": "titan-rack17",
    "domain name": "titan-rack17.ops.acme-turbines.com",
    "IPv4": "10.83.117.42",
    "IPv6": "fd12:3456:789a:1::7f3c",
    "MAC": "d8:5e:d3:4a:9c:17",
    "GPU UUID": "GPU-5f3a9c1e-7b2d-4e8f-a6c0-91d4b7e2f385",
    "GPU serial": "1654923018477",
    "machine id": "b7e4f1a2c93d48568e0f7a1b2c3d4e5f",
}
PROMPTS = [
    "Please rewrite the turbine twin for our client Halvorsen Offshore before the audit on Thursday",
    "the Halvorsen contract says that penalties start at four million kroner a week",
]
"""Sentences that only a prompt may say."""


def kernel_lines() -> list[str]:
    """As a machine's own log would have them."""
    s = SECRETS
    return [
        f"Nov 29 15:04:30 {s['host']} kernel: NVRM: GPU at PCI:0000:01:00: {s['GPU UUID']}",
        f"Nov 29 15:04:31 {s['host']} kernel: NVRM: GPU Board Serial Number: {s['GPU serial']}",
        f"Nov 29 15:04:31 {s['host']} kernel: e1000e 0000:00:1f.6 eno1: {s['MAC']} link up, peer {s['IPv4']}",
        json.dumps({"_HOSTNAME": s["host"], "_MACHINE_ID": s["machine id"], "MESSAGE": f"session for {s['user']}"}),
    ]


def engine_lines() -> list[str]:
    """As an engine's log would have them, some of them wrapped."""
    s = SECRETS
    packed = base64.b64encode(f"user={s['other user']} token={s['Hugging Face']}".encode()).decode()
    return [
        f"INFO api_key='{s['OpenAI']}', served from {s['home']} as {s['user']} on {s['domain name']}",
        f"DEBUG headers: Authorization: Bearer {s['bearer']}; x-api-key: {s['Anthropic']}",
        f"INFO login {s['mail']} ({s['mail of another']}) password={s['password']} wandb {s['W&B']}",
        f"WARNING postgresql://twin:{s['database']}@{s['domain name']}:5432/twin is slow from {s['IPv6']}",
        f"INFO GET /callback?next={quote(s['home on a Mac'], safe='')}&mail={quote(s['mail'], safe='')}",
        f"INFO blob {packed} hex {s['GitHub'].encode().hex()}",
        'INFO body {"note": "' + "".join(f"\\u{ord(c):04x}" for c in s["mail of another"]) + '"}',
        f"ERROR aws {s['AWS']} google {s['Google']} slack {s['Slack']} pypi {s['PyPI']} jwt {s['JWT']}",
        f"ERROR {s['GitHub fine']} {s['random']} cannot open {s['data path']}/model-00001.safetensors",
        f"INFO Received request cmpl-1: prompt: '{PROMPTS[0]}', params: SamplingParams(n=1)",
        f"DEBUG the tail of it: {PROMPTS[1][10:]}",
    ]


def forms_of(secret: str) -> Iterator[bytes]:
    """The secret as it stands and as it may be wrapped."""
    raw = secret.encode()
    yield raw.lower()
    yield quote(secret, safe="").encode().lower()
    yield "".join(f"%{byte:02x}" for byte in raw).encode()
    yield "".join(f"\\u{ord(c):04x}" for c in secret).encode()
    yield raw.hex().encode()
    yield secret[::-1].encode().lower()
    yield secret.encode("utf-16-le").lower()
    for shift in range(3):
        yield base64.b64encode(b" " * shift + raw)[4 if shift else 0 : -4].lower()


def members(archive: Path) -> dict[str, bytes]:
    """The files of a bundle by name, without their folder."""
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        found = {one.name.partition("/")[2]: tar.extractfile(one) for one in tar.getmembers()}
        return {name: stream.read() for name, stream in found.items() if stream is not None}


def survivors(files: dict[str, bytes]) -> list[tuple[str, str]]:
    """Which secret is in which file, in any form. Words of prompts count by five in a row."""
    found: list[tuple[str, str]] = []
    for name, data in files.items():
        folded = data.lower() + name.encode().lower()
        found += [(name, what) for what, secret in SECRETS.items() if any(form in folded for form in forms_of(secret))]
        for prompt in PROMPTS:
            words = prompt.lower().split()
            runs = [" ".join(words[n : n + 5]).encode() for n in range(len(words) - 4)]
            found += [(name, run.decode()) for run in runs if run in folded]
    return found
