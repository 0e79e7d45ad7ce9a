"""The redactor against a corpus: what has to go, what has to stay, and the same thing under the same name."""

from __future__ import annotations

import base64
import random
import string
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seeded_secrets import SECRETS, engine_lines, forms_of, kernel_lines
from soakrig.record.private_things import Known
from soakrig.record.redactor import Redactor
from soakrig.record.secret_patterns import looks_random

STAYS = [
    "NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0",
    "GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
    "6,1234,5678901234,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05",
    "Uvicorn running on http://127.0.0.1:8000 (Press CTRL+C to quit)",
    "GET /v1/chat/completions 200, /metrics 200, /health 503",
    "max_num_batched_tokens=8192 max_model_len=32768 prompt_tokens: 7044 tokens/s: 93.1 cached_tokens=12",
    "KeyError: 'layers.3.mlp.experts.w13_weight'",
    "cudnn 9.1.0.70, driver version 535.104.5.12",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8",
    "Qwen/Qwen3-30B-A3B Qwen3MoeForCausalLM DeepSeek-R1-Distill-Qwen-32B-AWQ VLLM_MOE_DMA_STAGING=1",
    "see https://github.com/vllm-project/vllm/issues/57822 and https://docs.nvidia.com/deploy/xid-errors",
    "20261129-150435-agent-loop-3f9a turn 12 of conversation 0, 1.5 s under load, 12:34:56.789",
    "torch.nn.modules.module std::vector<c10::Tensor> c10::cuda::check RoutingMethodType::Renormalize",
    "reading /dev/kmsg and /proc/1234/stat, libcuda at /usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "Authorization header missing; api_key=None, --api-key [redacted]",
    "[redacted]",
]
GOES = [
    ("export OPENAI_API_KEY=abcd1234efgh", "abcd1234efgh"),
    ("--hf-token hunter22secret --port 1", "hunter22secret"),
    ('{"password": "winter is here"}', "winter is here"),
    ("the password is hunter2x", "hunter2x"),
    ("Cookie: session=9f2", "session=9f2"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
    ("https://bob:pa55word@localhost:8000/x", "pa55word"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----", "IBAAKC"),
    ("ssh kim@workhorse: uptime", "workhorse"),
    ("ssh kim@workhorse: uptime", "kim"),
    ("cwd C:\\Users\\kim\\models", "kim"),
    ("file:///opt/kim/models/x", "/opt/kim"),
    ("open('/home/kim o hara/x y.txt')", "o hara"),
    ("~kim/models and ~/models/big", "kim/models"),
    ("uid=1000(kim) gid=1000", "kim"),
    ("GPU serial: 0324418030123", "0324418030123"),
    ("box.internal.lan refused", "box.internal.lan"),
    ("peer [2001:db8::42]:80", "2001:db8::42"),
    ("path=/home/kim%20x", "kim"),
    ('{"a": "\\/home\\/kim\\/x"}', "kim"),
    ("told by kim.larsen@github.com", "larsen"),
    ("dump 2f7372762f6b696d end", "2f7372762f6b696d"),
]


@pytest.mark.parametrize("text", STAYS)
def test_what_a_reader_needs_stays(text: str) -> None:
    redactor = Redactor(common={"localhost"})
    redactor.learn(text)
    assert redactor.text(text) == text


@pytest.mark.parametrize(("text", "secret"), GOES)
def test_what_tells_of_somebody_goes(text: str, secret: str) -> None:
    redactor = Redactor()
    redactor.learn(text)
    assert secret not in redactor.text(text)


@pytest.mark.parametrize("what", SECRETS)
@pytest.mark.parametrize("line", range(len(kernel_lines()) + len(engine_lines())))
def test_no_line_of_the_corpus_tells(line: int, what: str) -> None:
    redactor = corpus_redactor()
    made = redactor.text([*kernel_lines(), *engine_lines()][line]).encode().lower()
    assert not any(form in made for form in forms_of(SECRETS[what]))


_MADE: list[Redactor] = []


def corpus_redactor() -> Redactor:
    if not _MADE:
        _MADE.append(Redactor())
        for text in (*kernel_lines(), *engine_lines()):
            _MADE[0].learn(text)
    return _MADE[0]


def test_the_same_thing_has_the_same_name_everywhere() -> None:
    redactor = Redactor()
    texts = ["Nov 29 15:04:30 gpubox9 kernel: hello", "http://gpubox9.acme.com/x by kim", "ssh kim@gpubox9: x"]
    for text in texts:
        redactor.learn(text)
    made = [redactor.text(text) for text in texts]
    assert made == ["Nov 29 15:04:30 host-1 kernel: hello", "http://host-1/x by user-1", "ssh user-1@host-1: x"]
    assert redactor.counts["host"] == 3
    assert redactor.text(made[1]) == made[1]


def test_values_under_telling_names_go_and_counts_stay() -> None:
    redactor = Redactor(common={"settings", "token", "max", "tokens", "serial", "uuid", "user"})
    data = {"hf_token": "short1", "max_tokens": 512, "serial": 4711, "user": "kim", "settings": [{"boot_id": "x-y"}]}
    made = redactor.data(data)
    assert made == {"hf_token": "secret-1", "max_tokens": 512, "serial": "serial-1", "user": "user-1",
                    "settings": [{"boot_id": "uuid-1"}]}  # fmt: skip


def test_a_known_secret_goes_whatever_it_looks_like() -> None:
    redactor = Redactor([Known("secret", "correct horse", "the value of X_KEY")])
    assert redactor.text("say correct horse twice") == "say secret-1 twice"


def test_a_host_that_is_a_common_word_goes_only_where_it_is_a_name() -> None:
    redactor = Redactor(common={"engine"})
    line = "Nov 29 15:04:30 engine kernel: the engine is dead"
    redactor.learn(line)
    assert redactor.text(line) == "Nov 29 15:04:30 host-1 kernel: the engine is dead"
    assert ("host", "engine") in redactor.ambiguous


def test_code_files_and_packages_keep_what_says_where_a_fault_is() -> None:
    redactor = Redactor()
    text = 'File "/home/kim/venv/lib/python3.11/site-packages/vllm/v1/engine/core.py", line 9'
    assert redactor.text(text) == 'File "path-1/python3.11/site-packages/vllm/v1/engine/core.py", line 9'
    assert redactor.text('File "/workspace/twin/step.py", line 3') == 'File "path-2/step.py", line 3'


def test_drawn_strings_look_random_and_words_do_not() -> None:
    rng = random.Random(7)
    for alphabet, most in (
        (string.ascii_letters + string.digits, 0.05),
        (string.ascii_lowercase + string.digits, 0.08),
    ):
        drawn = ["".join(rng.choices(alphabet, k=32)) for _ in range(1000)]
        assert sum(not looks_random(one) for one in drawn) / 1000 < most
    assert all(looks_random(f"{rng.getrandbits(160):040x}") for _ in range(1000))


@given(st.text(max_size=200))
def test_redaction_is_its_own_fixed_point(text: str) -> None:
    redactor = Redactor()
    redactor.learn(text)
    made = redactor.text(text)
    assert redactor.text(made) == made


@given(st.sampled_from(sorted(SECRETS)), st.sampled_from(["plain", "percent", "escaped", "base64", "hex", "json"]))
def test_no_wrapping_helps(what: str, how: str) -> None:
    secret = SECRETS[what]
    wrapped = {
        "plain": secret,
        "percent": quote(secret, safe="").replace("-", "%2D"),
        "escaped": "".join(f"\\u{ord(one):04x}" for one in secret),
        "base64": base64.b64encode(f"value: {secret}".encode()).decode(),
        "hex": f"value: {secret}".encode().hex(),
        "json": f'{{"a": "x {secret} y"}}',
    }[how]
    redactor = corpus_redactor()
    made = redactor.text(f"seen {wrapped} here").encode().lower()
    assert not any(form in made for form in forms_of(secret))


@pytest.mark.parametrize(
    "piece", ["key", "a", "a.", "/a", "%41", "\\u0041", "QUJD", "x://", "--key ", "1:", "ab", '{"a":']
)
def test_no_text_takes_for_ever(piece: str) -> None:
    """100 kB on one line, in at most a second of this process's time: nothing is tried from every place to the end."""
    text = piece * (100_000 // len(piece))
    redactor, began = Redactor(), time.process_time()
    redactor.learn(text)
    redactor.text(text)
    assert time.process_time() - began < 1.0
