"""Whether a launch fits: the published figures to the byte, one place for the sums, both numbers in every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faked_machine import CARD_BYTES, GIB, MIB, embedded, fake_machine, glm53
from soakrig.cli.main import invoke
from soakrig.engine.planning.checkpoint import read_checkpoint
from soakrig.engine.planning.fit import (
    card_need,
    host_need,
    kv_cache,
    kv_tier,
    longest_context,
    placed,
    share_of_card,
)
from soakrig.engine.planning.quantity import Figure
from soakrig.engine.preflight.checks import FIT, run_checks
from soakrig.engine.preflight.finding import Finding
from soakrig.engine.preflight.stated import StatedLaunch, StatedMachine
from soakrig.engine.preflight.vram_parts import check_vram_parts, device_parts
from soakrig.engine.registry_entry import Entry
from soakrig.errors import UsageError
from sparse_checkpoint import GLM_EXPERTS, GLM_ROW, glm_checkpoint, write_sparse

ROOMY = ["--ram", "200 GiB", "--card", "95.6 GiB", "--shm", "92 GiB"]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glm_checkpoint(tmp_path_factory.mktemp("fit") / "glm")


def test_the_published_sums() -> None:
    need = host_need(Figure.of(125, "GiB"), Figure.of(30, "GiB"))
    assert need.total.to("GiB") == 155
    assert [(part.to("GiB"), part.source) for part in need.parts] == [(125, "offloaded"), (30, "while it loads")]
    assert kv_cache(327_680, 17_200).value == 5_636_096_000
    assert longest_context(5_636_096_000, 17_200) == 327_680
    assert longest_context(5_636_095_999, 17_200) == 327_679
    assert kv_tier(48).to("MiB") == 49_152
    assert share_of_card(CARD_BYTES, 0.95) == pytest.approx(90.82 * GIB, rel=1e-6)


def test_a_tier_of_48_is_gib_and_whole_chunks_of_it_are_49151_mib() -> None:
    """The message of an engine whose tier was 48 named 49,151 MiB: GiB, and less than a chunk of some MiB lost."""
    assert kv_tier(48, chunk=3 * MIB + 4096).to("MiB") == pytest.approx(49_151, abs=1.5)
    assert kv_tier(48, chunk=6 * MIB).to("MiB") == 49_152
    assert kv_tier(48).to("GB") > 51.5, "48 GB would be 45,776 MiB"


def test_the_registry_and_the_preflights_have_the_same_sums() -> None:
    entry = glm53()
    assert entry.host_need_gib == 155
    assert entry.kv_cap_bytes == kv_cache(entry.context, 17_200).value
    assert entry.host_need is not None
    assert entry.host_need.to_json()["total"] == {
        "value": 155 * GIB, "unit": "B", "kind": "derived", "source": "",
    }  # fmt: skip
    declared = glm53(host_ram_gib=170.0).host_need
    assert declared is not None
    assert [part.source for part in declared.parts] == ["as declared"]


def test_the_card_by_parts(glm: Path) -> None:
    entry = glm53(checkpoint=str(glm))
    parts = {part.source: part.to("GiB") for part in device_parts(entry, "/nonexistent").parts}
    layer = GLM_EXPERTS * GLM_ROW / GIB
    assert parts["resident weights"] == pytest.approx(17.70 + 10 * layer, abs=1e-3), "33 of 43 layers leave at 125"
    assert parts["slots"] == 54 * 33 * GLM_ROW / GIB
    assert parts["staging rows"] == 64 * GLM_ROW / GIB
    assert parts["KV cache"] == 5_636_096_000 / GIB
    assert list(parts) == ["resident weights", "slots", "staging rows", "KV cache"]


def by_parts(tmp_path: Path, entry: Entry, free: int) -> Finding:
    machine = StatedMachine(card=free).over(fake_machine(tmp_path))
    return check_vram_parts(entry, machine)


def test_the_card_by_parts_to_the_byte(glm: Path, tmp_path: Path) -> None:
    entry = glm53(checkpoint=str(glm))
    need = int(device_parts(entry, "/nonexistent").total.value)
    assert by_parts(tmp_path, entry, need).state == "ok"
    short = by_parts(tmp_path, entry, need - 1)
    assert short.state == "refused"
    assert short.remedy
    assert (short.needs, short.has) == (need / GIB, (need - 1) / GIB)
    for number in (
        "85.3 GiB needed",
        "55.7 GiB resident weights",
        "23.5 GiB slots",
        "5.2 GiB KV cache",
        "85.3 GiB free",
    ):
        assert number in short.text
    rest = by_parts(tmp_path, entry, CARD_BYTES).text
    assert "10.3 GiB left for activations, graphs and the CUDA context" in rest


@pytest.mark.parametrize("slots", [54, 60, 68, 96])
def test_slots_are_what_moves_the_card(glm: Path, tmp_path: Path, slots: int) -> None:
    entry = StatedLaunch(slots=str(slots), checkpoint=glm).over(glm53())
    assert by_parts(tmp_path, entry, CARD_BYTES).state == ("refused" if slots == 96 else "ok")


def test_no_cap_no_part_and_staging_off_no_rows(glm: Path, tmp_path: Path) -> None:
    entry = StatedLaunch(context=4096, offload=125.0, slots="54", checkpoint=glm).over(None)
    assert entry.kv_cap_bytes is None
    found = by_parts(tmp_path, entry, CARD_BYTES)
    assert "and for the KV cache, which has no cap" in found.text
    off = entry.model_copy(update={"settings": {**entry.settings, "VLLM_MOE_DMA_STAGING": "0"}})
    assert "staging rows" in found.text
    assert "staging rows" not in by_parts(tmp_path, off, CARD_BYTES).text


def test_parts_that_cannot_be_known_are_unknown(tmp_path: Path) -> None:
    for entry, why in (
        (glm53(), "is not there"),
        (glm53(checkpoint="zai/glm"), "there are no files of zai/glm to read here"),
        (glm53(settings={"CPU_OFFLOAD_GB": "much"}, checkpoint=str(tmp_path)), "a number was expected"),
        (embedded(flags=("--device=cuda",)), "there are no files of embedded"),
    ):
        found = by_parts(tmp_path, entry, CARD_BYTES)
        assert (found.state, why in found.text) == ("unknown", True), found.text
    assert check_vram_parts(embedded(), fake_machine(tmp_path)).text == "it computes on the CPU"
    unseen = fake_machine(tmp_path, cards=None)
    dim = StatedMachine(card=CARD_BYTES).over(unseen).gpu.cards
    assert dim is not None
    assert dim[0].total == CARD_BYTES


def test_a_dense_model_leaves_by_bytes(tmp_path: Path) -> None:
    write_sparse(tmp_path / "model.safetensors", {"lm_head.weight": ("U8", [10 * GIB], 10 * GIB)})
    (tmp_path / "config.json").write_text("{}")
    found = placed(read_checkpoint(str(tmp_path)), {"CPU_OFFLOAD_GB": "4"})
    assert (found.host.to("GiB"), found.resident.to("GiB"), found.slots.value) == (4, 6, 0)
    whole = card_need(placed(read_checkpoint(str(tmp_path)), {"CPU_OFFLOAD_GB": "40"}), None)
    assert whole.parts == ()
    with pytest.raises(UsageError, match="has 0 layers with routed experts"):
        placed(read_checkpoint(str(tmp_path)), {"VLLM_MOE_HOT_SLOTS": "4"})


def test_what_is_stated_takes_the_place_of_the_registrys_own() -> None:
    entry = StatedLaunch(offload=105.0, transient=10.0, tier=48.0).over(glm53(host_ram_gib=170.0, shm_gib=3.0))
    assert (entry.host_need_gib, entry.offload_gib, entry.shm_gib) == (115, 105, None)
    assert not [flag for flag in entry.flags if flag.startswith("--cpu-offload-gb")]
    assert StatedLaunch(host_ram=160.0).over(glm53()).host_need_gib == 160
    assert StatedLaunch().over(glm53()) == glm53()
    assert StatedLaunch(kv_cap=5_636_096_000).over(glm53()).flags[-1] == "--kv-cache-memory-bytes=5636096000"


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> Any:
    assert invoke(["plan", "fit", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def of(found: Any, name: str) -> Any:
    return next(one for one in found["findings"] if one["name"] == name)


def test_the_shipped_launch_fits_the_operators_machine(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "glm53", "--checkpoint", str(glm), *ROOMY, code=0)
    assert [one["name"] for one in found["findings"]] == list(FIT)
    assert {one["state"] for one in found["findings"]} == {"ok"}
    assert found["host"]["total"]["value"] == 155 * GIB
    assert found["kv_cap_bytes"] == 5_636_096_000
    assert [part["source"] for part in found["card"]["parts"]][:2] == ["resident weights", "slots"]
    assert invoke(["plan", "fit", "glm53", "--checkpoint", str(glm), *ROOMY]) == 0
    assert "nothing stands in the way of glm53" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "name", "needs", "has"),
    [
        (["--context", "327681"], "context", 327_681, 327_680),
        (["--context", "1048577", "--validated", "2000000", "--kv-per-token", "9 B"], "context", 1_048_577, 1_048_576),
        (["--kv-cap", "5636095999 B"], "kv-cap", 5_636_096_000, 5_636_095_999),
        (["--ram", f"{155 * GIB - 1} B"], "host-ram", 155, 155 - 1 / GIB),
        (["--offload", "170.5 GiB"], "host-ram", 200.5, 200),
        (["--card-used", "5 GiB"], "vram", 0.95 * 95.6, 90.6),
        (["--card", "80 GiB", "--utilisation", "0.9"], "vram-parts", 85.3, 80),
        (["--slots", "96"], "vram-parts", 103.5, 95.6),
        (["--kv-tier", "48 GiB", "--shm", "32 GiB"], "shm", 48, 32),
    ],
)
def test_each_refusal_has_both_numbers_and_a_remedy(
    glm: Path, capsys: pytest.CaptureFixture[str], argv: list[str], name: str, needs: float, has: float
) -> None:
    found = run(capsys, "glm53", "--checkpoint", str(glm), *ROOMY, *argv, code=3)
    assert found["verdict"] == "refused"
    refused = of(found, name)
    assert refused["state"] == "refused"
    assert (refused["needs"], refused["has"]) == pytest.approx(
        (needs, has), abs=0.1 if name.startswith("vram") else 1e-9
    )
    assert refused["remedy"]
    assert [one["name"] for one in found["findings"] if one["state"] == "refused"] == [name]


def test_a_checkpoint_and_given_figures_are_a_launch(glm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--offload", "125 GiB", "--slots", "54", "--transient", "30 GiB", "--kv-per-token", "17200 B"]
    more = ["--context", "327680", "--validated", "327680", "--utilisation", "0.95"]
    found = run(capsys, "--checkpoint", str(glm), *given, *more, *ROOMY, code=0)
    assert (found["model"], found["kv_cap_bytes"]) == ("glm", 5_636_096_000)
    assert of(found, "vram-parts")["needs"] == pytest.approx(85.3, abs=0.1)
    bare = run(capsys, "--checkpoint", str(glm), *ROOMY, code=3)
    assert of(bare, "context")["state"] == "unknown", "1,048,576 of the checkpoint, and nobody validated them"
    assert of(bare, "vram-parts")["state"] == "refused", "without offload the card is too small"
    assert of(bare, "host-ram")["state"] == "unknown"
    assert "48 GiB needed" in of(run(capsys, "glm53", *ROOMY, "--kv-tier", "48 GiB", code=2), "shm")["text"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "neither MODEL nor --checkpoint"),
        (["glm52"], "'glm53' was meant"),
        (["glm53", "--kv-tier", "48 GB"], "48,000,000,000 B if GB is"),
        (["glm53", "--ram", "155"], "a number and a unit of bytes were expected"),
        (["glm53", "--context", "0"], "context is 0"),
        (["glm53", "--utilisation", "1.5"], "gpu_memory_utilization is 1.5"),
        (["glm53", "--cards", "0"], "--cards 0"),
        (["--checkpoint", "/nowhere"], "is not there"),
        (["glm53", "--kv-per-token", "0 B"], "kv_bytes_per_token is 0"),
    ],
)
def test_bad_input_is_told(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    found = run(capsys, *argv, code=64)
    assert says in found["error"] + found["remedy"]


def test_a_checkpoint_without_a_context_has_to_be_told_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "give --context" in run(capsys, "--checkpoint", str(tmp_path), code=64)["remedy"]


def test_nothing_stated_is_this_host(tmp_path: Path) -> None:
    host = fake_machine(tmp_path, available_kib=70 * MIB)
    assert StatedMachine().over(host) == host
    (found,) = run_checks(glm53(), StatedMachine(ram=155 * GIB).over(host), names=["host-ram"])
    assert found.state == "ok"
    assert "155.0 GiB stated" in found.text
    assert "swap" not in found.text
