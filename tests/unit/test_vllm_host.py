"""The plug-in's own side of a vLLM layer, on modules that stand in for vLLM's: what is taken, moved, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from soakrig.engine.offload.trace import read_trace
from soakrig.engine.vllm import parts
from soakrig.engine.vllm.expert_tensors import expert_tensors
from soakrig.engine.vllm.host import Host
from soakrig.engine.vllm.planted import WorkerPlant
from soakrig.engine.vllm.settings import VllmSettings
from soakrig.errors import EngineStartError, UsageError

EXPERTS = 6


class StubMoE(torch.nn.Module):
    """Stands in for ``RoutedExperts``: its names and shapes, no kernel."""

    def __init__(self, number: int, **sizes: int) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{number}.mlp.experts"
        self.local_num_experts = EXPERTS
        self.top_k = 2
        parallel = {"tp_size": 1, "dp_size": 1, "ep_size": 1, **sizes}
        self.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(**parallel))
        self.quant_method = SimpleNamespace(is_monolithic=False)
        self.add("w13_weight", torch.arange(EXPERTS * 8.0).view(EXPERTS, 4, 2) + 100 * number)
        # Scales come transposed from some packings, with the same memory behind.
        self.add("w13_weight_scale", torch.arange(EXPERTS * 6.0).view(EXPERTS, 3, 2).transpose(1, 2))
        self.add("w13_input_scale", torch.ones(1).expand(EXPERTS))
        self.add("e_score_correction_bias", torch.arange(float(EXPERTS)))

    def add(self, name: str, data: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


def host(**environment: str) -> Host:
    return Host(VllmSettings.from_environment(environment))


def loaded(one: Host, *modules: StubMoE) -> Host:
    for module in modules:
        one.take(one.adopt(module))
    return one


def finished(one: Host) -> Host:
    one.finish(SimpleNamespace(model="/models/tiny"), 16, torch.device("cpu"))
    return one


def test_every_tensor_of_an_expert_travels_and_keeps_its_layout() -> None:
    modules = [StubMoE(3), StubMoE(5)]
    before = [{name: p.data.clone() for name, p in module.named_parameters()} for module in modules]
    objects = [dict(module.named_parameters()) for module in modules]
    one = finished(loaded(host(VLLM_MOE_HOT_SLOTS="2"), *modules))
    assert one.store is not None
    for number, module, was, held in zip((3, 5), modules, before, objects, strict=True):
        bank = one.store.offloaded[number].bank
        assert set(bank.host) == {"w13_weight", "w13_weight_scale"}, "what is all experts' or the router's stays"
        assert torch.equal(bank.host["w13_weight_scale"].transpose(1, 2), was["w13_weight_scale"])
        now = dict(module.named_parameters())
        assert all(now[name] is held[name] for name in now), "kernels hold on to the parameter objects"
        assert now["w13_weight"].shape == (4 + 64, 4, 2)
        assert now["w13_weight_scale"].stride()[1:] == was["w13_weight_scale"].stride()[1:]
        for name in ("w13_input_scale", "e_score_correction_bias"):
            assert torch.equal(now[name], was[name])
    one.store.begin_step(__import__("numpy").zeros(1, dtype="uint8"))
    for number, module, was in zip((3, 5), modules, before, strict=True):
        (part,) = one.store.parts(number, torch.tensor([[4, 1]]))
        for place, expert in enumerate((4, 1)):
            row = int(part.rows[0, place])
            assert torch.equal(module.w13_weight.data[row], was["w13_weight"][expert])
            assert torch.equal(module.w13_weight_scale.data[row], was["w13_weight_scale"][expert])


def test_layers_that_stay_are_left_as_they_are() -> None:
    row = 4 * 2 * 4 + 3 * 2 * 4
    modules = [StubMoE(0), StubMoE(1), StubMoE(2)]
    data = [module.w13_weight.data for module in modules]
    one = finished(loaded(host(CPU_OFFLOAD_GB=f"{1.5 * EXPERTS * row / 2**30:.12f}"), *modules))
    assert one.store is not None
    assert sorted(one.store.offloaded) == [0, 1], "the last may overshoot"
    assert modules[2].w13_weight.data is data[2] or modules[2].w13_weight.data.data_ptr() == data[2].data_ptr()
    (part,) = one.store.parts(2, torch.tensor([[1, 0]]))
    assert part.rows.tolist() == [[1, 0]]


def test_staging_off_reads_the_bank_and_has_no_slots() -> None:
    one = finished(loaded(host(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_DMA_STAGING="0"), StubMoE(0)))
    assert one.store is not None
    assert [layer.slots for layer in one.store.plan.layers] == [0]
    assert "so that there are no slots" in one.store.plan.warnings[-1]
    assert one.modules[0].w13_weight.data.data_ptr() == one.store.offloaded[0].bank.host["w13_weight"].data_ptr()


def test_a_buffer_that_moved_since_the_model_was_loaded_stops_the_first_step() -> None:
    one = finished(loaded(host(VLLM_MOE_HOT_SLOTS="2"), StubMoE(0)))
    assert one.store is not None
    pool = one.store.offloaded[0].slots.pool
    pool.last = pool.last.clone()
    with pytest.raises(EngineStartError, match=r"moved after graph capture, slots\.0\.last"):
        one.begin_step(1, list)


@pytest.mark.parametrize("what", ["tp_size", "dp_size", "ep_size"])
def test_more_than_one_card_is_refused(what: str) -> None:
    with pytest.raises(EngineStartError, match="parallelism of 2 and offloaded experts: this plug-in serves one card"):
        host(VLLM_MOE_HOT_SLOTS="2").adopt(StubMoE(0, **{what: 2}))


def test_a_kernel_that_routes_by_itself_is_refused() -> None:
    module = StubMoE(0)
    module.quant_method.is_monolithic = True
    with pytest.raises(EngineStartError, match="routes by itself") as caught:
        loaded(host(VLLM_MOE_HOT_SLOTS="2"), module)
    assert "--moe-backend" in str(caught.value)


def test_a_packing_without_an_expert_axis_is_refused_with_both_shapes() -> None:
    module = StubMoE(0)
    module.add("w2_weight", torch.zeros(4, EXPERTS, 2))
    with pytest.raises(EngineStartError, match=r"w2_weight .* has the shape \(4, 6, 2\) .* axis of 6 experts"):
        loaded(host(VLLM_MOE_HOT_SLOTS="2"), module)
    gaps = StubMoE(0)
    gaps.add("w2_weight", torch.zeros(EXPERTS, 4, 4)[:, :, :2])
    with pytest.raises(EngineStartError, match="laid out with gaps"):
        expert_tensors(gaps)


def test_what_does_not_fit_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(EngineStartError, match="no layer with routed experts, and offload was asked for"):
        finished(host(VLLM_MOE_HOT_SLOTS="2"))
    with pytest.raises(UsageError, match="asks for 7 slots in layer 0, which has 6 experts"):
        finished(loaded(host(VLLM_MOE_HOT_SLOTS="7"), StubMoE(0)))
    one = host(VLLM_MOE_HOT_SLOTS="2")
    one.adopt(StubMoE(0))
    with pytest.raises(EngineStartError, match=r"weights of layers \[0\] were never reported as loaded"):
        finished(one)
    with pytest.raises(EngineStartError, match="two MoE layers are numbered 0"):
        one.adopt(StubMoE(0))


def config(**offload: Any) -> Any:
    uva = SimpleNamespace(cpu_offload_gb=offload.get("gb", 0), cpu_offload_params=offload.get("params", set()))
    prefetch = SimpleNamespace(offload_group_size=offload.get("group", 0))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=offload.get("pipeline", 1)),
        offload_config=SimpleNamespace(uva=uva, prefetch=prefetch),
        use_v2_model_runner=offload.get("v2", False),
    )


def test_the_engines_own_offload_goes_beside_ours_where_it_takes_other_weights() -> None:
    one = host(VLLM_MOE_HOT_SLOTS="2")
    one.refuse(config())
    one.refuse(config(gb=4, params={"self_attn", "embed_tokens"}))
    for wrong, said in (
        (config(gb=125), r"--cpu-offload-gb 125 with --cpu-offload-params \(all\)"),
        (config(gb=4, params={"experts"}), "--cpu-offload-params experts"),
        (config(gb=4, params={"w2_weight"}), "--cpu-offload-params w2_weight"),
        (config(group=8), "--offload-group-size 8"),
        (config(pipeline=2), "pipeline parallelism of 2"),
        (config(v2=True), "Model Runner V2"),
    ):
        with pytest.raises(EngineStartError, match=said):
            one.refuse(wrong)
    host(VLLM_MOE_ROUTING_TRACE="/tmp/x.trace").refuse(config(gb=125))


@pytest.mark.parametrize(
    ("version", "known"), [("0.23.0", False), ("0.24.0", True), ("0.33.1", True), ("0.34.0", False)]
)
def test_an_unknown_vllm_is_refused_with_both_versions(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "installed_version", lambda: ("vllm", Version(version)))
    monkeypatch.setattr(parts, "HOOKS", {"join": ("os.path", "join")})
    if known:
        parts.check()
        return
    with pytest.raises(EngineStartError, match=rf"vllm {version} is not supported by the offload plug-in, which knows"):
        parts.check()


def test_a_vllm_that_lacks_a_hook_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "installed_version", lambda: ("vllm", Version("0.32.0")))
    monkeypatch.setattr(parts, "HOOKS", {"gone": ("os.path", "no_such_thing")})
    with pytest.raises(EngineStartError, match=r"has no os\.path\.no_such_thing"):
        parts.check()


def test_only_what_a_worker_can_do_may_be_planted() -> None:
    plant = VllmSettings.from_environment({"SOAKRIG_PLANT": '{"action": "cut"}'}).plant
    assert plant is not None
    with pytest.raises(UsageError, match="cut is a server's doing"):
        WorkerPlant(plant, holds=True)


def test_a_trace_beside_a_draft_model_is_refused_and_one_beside_ngrams_is_not() -> None:
    one = host(VLLM_MOE_ROUTING_TRACE="/tmp/x.trace")
    for method, refused in (("mtp", True), ("eagle3", True), ("ngram", False)):
        drafted = config()
        drafted.speculative_config = SimpleNamespace(method=method)
        if refused:
            with pytest.raises(EngineStartError, match=rf"VLLM_MOE_ROUTING_TRACE beside a draft model \({method}\)"):
                one.refuse(drafted)
        else:
            one.refuse(drafted)
        host(VLLM_MOE_HOT_SLOTS="2").refuse(drafted)


def test_weights_that_come_again_are_refused() -> None:
    one = finished(loaded(host(VLLM_MOE_HOT_SLOTS="2"), StubMoE(0)))
    with pytest.raises(EngineStartError, match="came again, and its experts are in host memory already"):
        one.take(0)


def test_nothing_is_asked_for_by_default() -> None:
    assert not VllmSettings.from_environment({}).asked
    assert not VllmSettings.from_environment({"VLLM_MOE_DMA_STAGING": "0"}).asked
    for asking in ({"VLLM_MOE_HOT_SLOTS": "2"}, {"CPU_OFFLOAD_GB": "1"}, {"VLLM_MOE_ROUTING_TRACE": "/tmp/x.trace"}):
        assert VllmSettings.from_environment(asking).asked


def test_a_server_that_asks_for_reports_has_profile_and_trace_on_disk(tmp_path: Path) -> None:
    profile, trace = tmp_path / "hot.json", tmp_path / "routing.trace"
    one = finished(
        loaded(
            host(VLLM_MOE_HOT_SLOTS="2", VLLM_MOE_SKEW_PERLAYER=str(profile), VLLM_MOE_ROUTING_TRACE=str(trace)),
            StubMoE(0),
        )
    )
    assert one.store is not None

    def step() -> None:
        assert one.store is not None
        one.begin_step(1, lambda: [("a", 1, True)])
        list(one.store.parts(0, torch.tensor([[4, 1]])))
        one.end_step()

    step()
    one.newest()
    assert len(read_trace(str(trace)).marks) == 1
    assert json.loads(profile.read_text())["steps"] == 1
    step()
    one.newest()
    assert json.loads(profile.read_text())["steps"] == 1, "busy, and written a moment ago"
    one.newest()
    assert json.loads(profile.read_text())["steps"] == 2, "idle since the last report"
    assert len(read_trace(str(trace)).marks) == 2
    one.store.close()
