"""The gateway as clients meet it: names, keys, limits, lists, metrics, and each policy over the wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway_bench import CHAT, Bench, bench, fixture, run, sse, whole
from soakrig.engine.gateway.app import Gateway
from soakrig.engine.gateway.policies import Policies
from soakrig.engine.gateway.upstream import Upstream
from soakrig.errors import UsageError
from wire import loopback
from wire.loopback import Exchange

LOW = {"chat_template_kwargs": {"reasoning_effort": "low"}}


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", **more}]}


def test_an_unknown_model_is_a_404_with_the_known_names() -> None:
    async def main() -> None:
        async with bench(presets={"m-low": LOW}) as b:
            answer = await b.ask({"model": "gpt-9", "messages": []})
            assert (answer.status, answer.error["type"]) == (404, "unknown_model")
            assert answer.error["message"] == "there is no model 'gpt-9' here; there are: m, m-low"
            assert b.stub.bodies == []
            assert b.count("requests_total", outcome="unknown_model", model="-") == 1
            assert (await b.ask({"model": "m"})).status == 200
            assert (await b.ask({"messages": []})).status == 200, "no name is the engine's own"

    run(main)


def test_an_engine_without_a_list_takes_every_name() -> None:
    async def main() -> None:
        missing = whole(b'{"error": {}}', "404 Not Found")
        async with bench(routes={"__v1__models": missing}) as b:
            assert (await b.ask({"model": "anything"})).status == 200
            assert b.stub.bodies == [b'{"model": "anything"}']

    run(main)


def test_a_name_that_the_engine_lists_later_is_found() -> None:
    async def main() -> None:
        names = row("m")
        async with bench(routes={"__v1__models": names}) as b:
            assert (await b.ask({"model": "adapter"})).status == 404
            names["data"].append({"id": "adapter"})
            assert (await b.ask({"model": "adapter"})).status == 200
            asked = b.stub.asked.count("/v1/models")
            assert (await b.ask({"model": "adapter"})).status == 200
            assert b.stub.asked.count("/v1/models") == asked, "a known name costs no question"

    run(main)


def test_named_engines_and_aliases_get_the_engine_s_own_name() -> None:
    async def main() -> None:
        async with bench(routes={"__v1__models": row("other-own-name")}) as other:
            policies = Policies(presets={"m-low": {"chat_template_kwargs": {"reasoning_effort": "low"}}})  # type: ignore[dict-item]
            second = Upstream("second", other.stub_url)
            async with bench(named={"second": second}, presets=policies.presets) as b:
                await b.ask({"model": "other-own-name", "y": 1})
                assert other.stub.sent() == {"model": "other-own-name", "y": 1}
                await b.ask({"model": "second", "x": 1})
                assert other.stub.sent() == {"model": "other-own-name", "x": 1}
                await b.ask({"model": "other-own-name"})
                assert other.stub.bodies[-1] == b'{"model": "other-own-name"}'
                await b.ask({"model": "m-low", "messages": []})
                assert b.stub.sent() == {"model": "m", "messages": [], **LOW}
                listed = (await b.ask(None, "/v1/models")).json
                assert [one["id"] for one in listed["data"]] == ["m", "m-low", "other-own-name", "second"]
                assert listed["data"][1] == {"id": "m-low", "object": "model", "max_model_len": 32768, "parent": "m"}
                unknown = await b.ask({"model": "zzz"})
                assert unknown.error["message"].endswith("m, other-own-name, second, m-low")
                asked = await b.ask(None, "/health?model=second")
                assert asked.status == 200
                assert "/health?model=second" in other.stub.asked

    run(main)


def test_one_engine_without_aliases_lists_its_own_bytes() -> None:
    async def main() -> None:
        body = b'{ "object":"list", "data":[ {"id":"m"} ] }'
        async with bench(routes={"__v1__models": whole(body)}) as b:
            assert (await b.ask(None, "/v1/models")).body == body

    run(main)


def test_no_engine_answers_for_its_models() -> None:
    async def main() -> None:
        async with bench(url="http://127.0.0.1:9", presets={"low": LOW}) as b:
            answer = await b.ask(None, "/v1/models")
            assert (answer.status, answer.error["type"]) == (502, "engine_unreachable")

    run(main)


def test_two_aliases_of_one_name_are_refused() -> None:
    one, two = (Upstream(name, "http://127.0.0.1:9", Policies(presets={"low": {}})) for name in "ab")  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="'low' stands for two models"):
        Gateway(one, {"b": two})


def test_a_key_is_asked_for_and_goes_no_further() -> None:
    async def main() -> None:
        async with bench(gateway={"api_key": "s3cret"}, upstream={"api_key": "theirs"}) as b:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "s3cret"},
                {"Authorization": "Basic s3cret"},
            ):
                for path, body in ((CHAT, b"{}"), ("/v1/models", None), ("/metrics", None), ("/health", None)):
                    answer = await b.ask(body, path, headers=headers)
                    assert (answer.status, answer.error["type"]) == (401, "unauthorized")
                    assert answer.headers["www-authenticate"] == "Bearer"
            assert b.stub.bodies == b.stub.asked == []
            assert (await b.ask(headers={"Authorization": "Bearer s3cret"})).status == 200
            assert b"s3cret" not in b.stub.heads[0]
            assert b"authorization: bearer theirs" in b.stub.heads[0].lower()
        async with bench(gateway={"api_key": "s3cret"}) as b:
            await b.ask(headers={"Authorization": "bearer s3cret"})
            assert b"uthorization" not in b.stub.heads[0]

    run(main)


def test_a_body_has_a_limit() -> None:
    async def main() -> None:
        async with bench(gateway={"max_body": 100}) as b:
            assert (await b.ask(b" " * 98 + b"{}")).status == 200
            answer = await b.ask(b" " * 99 + b"{}")
            assert (answer.status, answer.error["type"]) == (413, "body_too_long")
            assert "100 bytes" in answer.error["message"]
            chunked = b"65\r\n" + b" " * 99 + b"{}\r\n0\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunked)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 413"), "before a byte of it was sent"
            writer.close()
            assert len(b.stub.bodies) == 1

    run(main)


def test_paths_that_are_not_there_are_named() -> None:
    async def main() -> None:
        async with bench() as b:
            answer = await b.ask(b"{}", "/v1/audio/speech")
            assert (answer.status, answer.error["type"]) == (404, "unknown_path")
            assert "POST /v1/chat/completions" in answer.error["message"]
            assert (await b.ask(None, CHAT)).status == 405
            assert b.stub.bodies == b.stub.asked == []

    run(main)


def test_metrics_are_the_gateway_s_and_then_the_engine_s() -> None:
    async def main() -> None:
        theirs = b"# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total 7.0\n"

        async def exposition(x: Exchange) -> None:
            x.writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(theirs) + theirs
            )
            await x.writer.drain()

        async with bench(routes={"__metrics": exposition}) as b:
            await b.ask()
            answer = await b.ask(None, "/metrics")
            found = {f.name: f for f in text_string_to_metric_families(answer.body.decode())}
            assert found["vllm:prompt_tokens"].samples[0].value == 7
            assert found["soakrig_gateway_first_byte_seconds"].samples[-1].labels == {"model": "stub"}
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        async with bench(url="http://127.0.0.1:9") as b:
            silent = await b.ask(None, "/metrics")
            assert silent.status == 200
            assert b"# http://127.0.0.1:9 does not answer GET /metrics" in silent.body

    run(main)


async def second_turn(b: Bench) -> Any:
    """The agent's first turn, then its history with the tool's result; what the engine was sent the second time."""
    await b.ask(fixture("req-first.json"))
    await b.ask(fixture("req-no-reasoning.json"))
    assert b.stub.bodies[0] == fixture("req-first.json")
    return b.stub.sent()


@pytest.mark.parametrize("answer", ["stream-reasoning-call.sse", "reasoning-call.json"])
def test_restore_reasoning(answer: str) -> None:
    async def main() -> None:
        handler = sse(fixture(answer)) if answer.endswith("sse") else whole(fixture(answer))
        expected = json.loads(fixture("req-no-reasoning.json"))
        async with bench(handler) as b:
            assert await second_turn(b) == expected
            assert b.stub.bodies[1] == fixture("req-no-reasoning.json")
        thought = "The listing comes first — über den Baum."
        expected["messages"][2] |= {"reasoning": thought, "reasoning_content": thought}
        async with bench(handler, restore_reasoning=True) as b:
            assert await second_turn(b) == expected
            assert b.count("policy_total", policy="restore_reasoning", effect="request") == 1

    run(main)


def test_tokenize_shows_the_prompt_that_the_engine_will_see() -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def tokenize(x: Exchange) -> None:
            seen.append(json.loads(x.body))
            await x.json({"count": 1})

        policies = {"restore_reasoning": True, "sanitize_tool_tags": True, "presets": {"m-low": LOW}}
        async with bench(sse(fixture("stream-reasoning-call.sse")), routes={"__tokenize": tokenize}, **policies) as b:
            await b.ask(fixture("req-first.json"))
            await b.ask(fixture("req-no-reasoning.json").replace(b'"model":"m"', b'"model":"m-low"'), "/tokenize")
            await b.ask(fixture("req-leaked-echo.json"), "/tokenize")
        assert seen[0]["messages"][2]["reasoning"].startswith("The listing")
        assert (seen[0]["model"], seen[0]["chat_template_kwargs"]) == ("m", LOW["chat_template_kwargs"])
        assert seen[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "list_dir"

    run(main)


def test_an_answer_without_a_call_is_found_by_its_place() -> None:
    async def main() -> None:
        async with bench(sse(fixture("stream-reasoning-vllm.sse")), restore_reasoning=True) as b:
            first = json.loads(fixture("req-first.json"))
            await b.ask(first)
            said = {"role": "assistant", "content": "I read the tree first."}
            await b.ask({**first, "messages": [*first["messages"], said, {"role": "user", "content": "And then?"}]})
            assert b.stub.sent()["messages"][2]["reasoning"].startswith("The listing")
            other = [{"role": "user", "content": "Something else"}, said, {"role": "user", "content": "And then?"}]
            await b.ask({**first, "messages": other})
            assert b.stub.sent()["messages"] == other

    run(main)


def test_the_next_turn_may_come_before_the_stream_has_ended() -> None:
    async def main() -> None:
        async def stays_open(x: Exchange) -> None:
            await x.head()
            await x.chunk(fixture("stream-reasoning-call.sse"))
            await asyncio.Event().wait()

        async with bench(stays_open, restore_reasoning=True) as b:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(b.url.rpartition(":")[2]))
            body = fixture("req-first.json")
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await reader.readuntil(b"[DONE]")
            b.stub.handler = loopback.good
            await b.ask(fixture("req-no-reasoning.json"))
            assert b.stub.sent()["messages"][2]["reasoning"].startswith("The listing")
            writer.close()

    run(main)


def test_an_echoed_leak_is_repaired_on_its_way_in() -> None:
    async def main() -> None:
        sent = fixture("req-leaked-echo.json")
        async with bench(sanitize_tool_tags=True) as b:
            await b.ask(sent)
            assert b.stub.bodies[0] == sent.replace(b"</arg_value>", b"").replace(b"</arg_key>", b"")
            assert b.count("policy_total", policy="sanitize_tool_tags", effect="request") == 1
            await b.ask(fixture("req-odd-bytes.json"))
            assert b.stub.bodies[1] == fixture("req-odd-bytes.json")
        async with bench() as b:
            await b.ask(sent)
            assert b.stub.bodies[0] == sent

    run(main)


def test_an_answer_is_repaired_on_its_way_out_and_counted_once() -> None:
    async def main() -> None:
        for handler, effect in ((sse(fixture("leak-split.sse")), "a"), (whole(fixture("leak-key.json")), "b")):
            async with bench(handler, sanitize_tool_tags=True, mirror_content=True) as b:
                answer = await b.ask(fixture("req-first.json"))
                assert answer.clean
                assert b"arg" not in answer.body.replace(b'"arguments"', b"")
                await b.counted("policy_total", 1, policy="sanitize_tool_tags", effect="answer")
                assert b.count("policy_total", policy="mirror_content") == 0, effect
                if effect == "b":
                    assert int(answer.headers["content-length"]) == len(answer.body)

    run(main)


async def strict(x: Exchange) -> None:
    """Refuses a budget above 4,000, as an engine whose context is short."""
    if json.loads(x.body).get("max_tokens", 0) > 4000:
        await x.json({"error": {"message": "too many tokens"}}, "400 Bad Request")
    else:
        await loopback.good(x)


def test_a_small_budget_over_the_wire() -> None:
    async def main() -> None:
        sent = fixture("req-small-budget.json")
        async with bench(min_output_tokens=8192) as b:
            assert (await b.ask(sent)).status == 200
            assert b.stub.sent() == {**json.loads(sent), "max_tokens": 8192}
            assert b.count("policy_total", policy="min_output_tokens", effect="request") == 1
            await b.ask(fixture("req-first.json"))
            assert b.stub.bodies[-1] == fixture("req-first.json"), "no budget, nothing to raise"
        async with bench(strict, min_output_tokens=8192) as b:
            assert (await b.ask(sent)).status == 200
            assert [json.loads(body)["max_tokens"] for body in b.stub.bodies] == [8192, 200]
            assert b.count("policy_total", policy="min_output_tokens", effect="undone") == 1

    run(main)


def test_a_raised_budget_is_clamped_by_the_engine_s_own_count() -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def tokenize(x: Exchange) -> None:
            seen.append(json.loads(x.body))
            await x.json({"count": 30_000, "max_model_len": 32768})

        long = {"model": "m", "messages": [{"role": "user", "content": "w " * 40_000}], "max_tokens": 200, "top_k": 3}
        async with bench(min_output_tokens=8192, routes={"__tokenize": tokenize}) as b:
            await b.ask(long)
            assert b.stub.sent() == {**long, "max_tokens": 2768}
            assert seen == [{"model": "m", "messages": long["messages"]}]
        silent = {"__tokenize": tokenize, "__v1__models": {"data": [{"id": "m"}]}}
        for routes, tokens in (({"__tokenize": tokenize}, 2768), (silent, 1000)):
            async with bench(min_output_tokens=8192, upstream={"context": 31_000}, routes=routes) as b:
                await b.ask(long)
                assert b.stub.sent()["max_tokens"] == tokens, "the engine knows what it was started with, where it says"

    run(main)


def test_thinking_budget_and_efforts_over_the_wire() -> None:
    async def main() -> None:
        budget = {"fixed": 10_000, "share": 0.75}
        async with bench(thinking_token_budget=budget, min_output_tokens=4000, effort_words={"medium": "high"}) as b:
            await b.ask({"model": "m", "messages": [], "max_tokens": 100, "reasoning_effort": "medium"})
            assert b.stub.sent() == {"model": "m", "messages": [], "max_tokens": 4000, "reasoning_effort": "high",
                                     "thinking_token_budget": 3000}  # fmt: skip
            assert b.count("effort_total", effort="high", model="stub") == 1

    run(main)


def test_a_body_that_is_no_object_is_the_engine_s_to_refuse() -> None:
    async def main() -> None:
        async with bench(restore_reasoning=True, sanitize_tool_tags=True, min_output_tokens=10) as b:
            odd: Any = {
                "model": "m",
                "messages": [3, None, {"role": "assistant", "tool_calls": "x", "content": 7}],
                "max_tokens": "9",
            }
            bodies = [b"", b"broken", b"[]", b'"x"', json.dumps(odd).encode()]
            for body in bodies:
                assert (await b.ask(body)).status == 200
            assert b.stub.bodies == bodies

    run(main)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"])
def test_other_paths_pass(path: str) -> None:
    async def main() -> None:
        async with bench(whole(b'{"ok": true}'), routes={"__tokenize": whole(b'{"ok": true}')}) as b:
            answer = await b.ask(b'{ "model": "m" }', path)
            assert answer.body == b'{"ok": true}'

    run(main)
