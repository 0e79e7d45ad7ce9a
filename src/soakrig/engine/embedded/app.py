"""The HTTP routes: OpenAI's and vLLM's endpoints over one ``Service``."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import soakrig
from soakrig.engine.offload.metrics import window_report
from soakrig.errors import UsageError

from .answers import Answer, ChatAnswer, CompletionAnswer, Json, usage_object
from .event_stream import ClientGoneError, CutAnswer, EventStream, unless_gone
from .link import WorkerDeadError
from .planted import ConnectionCutError, ErrorFrameError, events_with_fault
from .request_body import ChatRequest, CompletionRequest, Generation, RequestError, TokenizeRequest, parse
from .service import EngineDeadError, Reply, Service

CLIENT_GONE = 499
DONE = b"data: [DONE]\n\n"
PLANTED_ERROR = "CUDA error: an illegal memory access was encountered (planted)"


KINDS = {"bad_expert_id": "BadExpertId"}
"""Code of a failed request -> its type in the error object."""


class _FailedError(Exception):
    """The worker could not go on with this one request; ``code`` where it says why in a word."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code

    @property
    def body(self) -> Json:
        if self.code is None:
            return error_body(str(self), 500)
        return error_body(str(self), self.code, KINDS[self.code])


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def error_body(message: str, code: int | str, kind: str = "InternalServerError") -> Json:
    """OpenAI's error object; ``code`` is the HTTP status, or a word for what has one."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _frame(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Routes:
    """The handlers. A handler raises RequestError for a refusal and WorkerDeadError once the worker is gone."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.completions), methods=["POST"]),
            Route("/tokenize", self._guarded(self.tokenize), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/health", self._guarded(self.health), methods=["GET"]),
            Route("/metrics", self._guarded(self.metrics), methods=["GET"]),
            Route("/soakrig/settings", self._guarded(self.settings), methods=["GET"]),
            Route("/soakrig/offload", self._guarded(self.offload), methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def chat(self, request: Request) -> Response:
        service = self._service
        body = parse(await request.body(), ChatRequest)
        reply = await service.chat(body)
        if reply.planted == "empty_200" and not body.stream:
            async for _ in events_with_fault(service, reply):
                pass
            return Response(b"", media_type="application/json")
        answer = ChatAnswer(
            reply,
            service.config.served_model_name,
            service.fingerprint,
            service.tokenizer,
            wants_logprobs=body.logprobs,
            top_logprobs=body.top_logprobs or 0,
        )
        if body.stream:
            return self._stream(body, reply, self._chat_frames(body, answer))
        return await self._whole(request, reply, self._collect_chat(answer))

    async def completions(self, request: Request) -> Response:
        service = self._service
        body = parse(await request.body(), CompletionRequest)
        reply = await service.completion(body)
        answer = CompletionAnswer(
            reply,
            service.config.served_model_name,
            service.fingerprint,
            service.tokenizer,
            wants_logprobs=body.logprobs is not None,
        )
        if body.stream:
            return self._stream(body, reply, self._completion_frames(body, answer))
        return await self._whole(request, reply, self._collect_completion(answer))

    async def tokenize(self, request: Request) -> Response:
        service = self._service
        body = parse(await request.body(), TokenizeRequest)
        if body.messages is not None:
            extra = body.chat_template_kwargs or {}
            thinking = bool(extra.get("enable_thinking", True))
            ids = await service.prompt(
                body.messages, body.tools, thinking=thinking, generation=body.add_generation_prompt, extra=extra
            )
        else:
            ids = await service.encode(body.prompt or "")
        strings = [service.tokenizer.text_of[i] for i in ids] if body.return_token_strs else None
        counted: Json = {"count": len(ids), "max_model_len": service.config.max_model_len, "tokens": ids}
        return json_response({**counted, "token_strs": strings})

    async def models(self, request: Request) -> Response:
        config = self._service.config
        model: Json = {
            "id": config.served_model_name,
            "object": "model",
            "created": 0,
            "owned_by": "soakrig",
            "root": config.served_model_name,
            "parent": None,
            "max_model_len": config.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """A flag, as real engines have it: 503 once the worker is dead, 200 even while it is frozen."""
        link = self._service.link
        age = round(link.heartbeat_age, 3)
        if link.alive:
            return json_response({"status": "ok", "heartbeat_age_s": age})
        return json_response({"status": "dead", "heartbeat_age_s": age, **error_body(link.how_ended, 503)}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def settings(self, request: Request) -> Response:
        service = self._service
        return json_response(
            {
                "engine": "embedded",
                "version": soakrig.__version__,
                "pid": os.getpid(),
                "worker_pid": service.link.pid,
                "settings": service.settings.report(),
                "config": service.config.report(),
                "plant": service.plant.plant.report() if service.plant else None,
                "simulated": service.simulated,
                "offload": {**service.plan.report(), "memory": service.link.memory},
            }
        )

    async def offload(self, request: Request) -> Response:
        """The expert cache's counters and rates, by layer and in total: over a window of engine steps, or all."""
        service = self._service
        try:
            return json_response(window_report(service.plan, service.history, request.query_params))
        except UsageError as error:
            raise RequestError(str(error)) from error

    def _stream(self, body: Generation, reply: Reply, frames: AsyncGenerator[bytes, None]) -> Response:
        return EventStream(self._guard_frames(frames), lambda: self._service.link.abort(reply.id))

    async def _guard_frames(self, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Frames, and what a stream says when something goes wrong under its 200."""
        try:
            async for frame in frames:
                yield frame
        except EngineDeadError as error:
            # The error frame and no terminator: the engine is gone.
            yield _frame(error_body(str(error), 500))
        except ErrorFrameError:
            yield _frame(error_body(PLANTED_ERROR, 500))
            yield DONE
        except _FailedError as error:
            yield _frame(error.body)
            yield DONE

    async def _chat_frames(self, body: ChatRequest, answer: ChatAnswer) -> AsyncGenerator[bytes, None]:
        async for event in events_with_fault(self._service, answer.reply):
            _raise_failed(event)
            for delta in answer.deltas(event):
                yield _frame(self._with_usage(body, answer, answer.chunk(delta)))
        if answer.finish_reason is None:
            return
        yield _frame(self._with_usage(body, answer, answer.chunk({}, answer.finish_reason)))
        for frame in self._tail(body, answer, "chat.completion.chunk"):
            yield frame

    async def _completion_frames(
        self, body: CompletionRequest, answer: CompletionAnswer
    ) -> AsyncGenerator[bytes, None]:
        async for event in events_with_fault(self._service, answer.reply):
            _raise_failed(event)
            text = answer.piece(event)
            if text is not None:
                yield _frame(self._with_usage(body, answer, answer.chunk(text)))
        yield _frame(self._with_usage(body, answer, answer.chunk("", answer.finish_reason)))
        for frame in self._tail(body, answer, "text_completion"):
            yield frame

    def _tail(self, body: Generation, answer: Answer, kind: str) -> list[bytes]:
        if body.stream_options is not None and body.stream_options.include_usage:
            return [_frame({**answer.envelope(kind, []), "usage": answer.usage}), DONE]
        return [DONE]

    def _with_usage(self, body: Generation, answer: Answer, chunk: Json) -> Json:
        if body.stream_options is not None and body.stream_options.continuous_usage_stats:
            chunk["usage"] = usage_object(len(answer.reply.prompt), answer.tokens, answer.cached)
        return chunk

    async def _whole(self, request: Request, reply: Reply, work: Awaitable[Json]) -> Response:
        try:
            return json_response(await unless_gone(request, work))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except ConnectionCutError:
            return CutAnswer()
        except EngineDeadError as error:
            return json_response(error_body(str(error), 500), 500)
        except ErrorFrameError:
            return json_response(error_body(PLANTED_ERROR, 500), 500)
        except _FailedError as error:
            return json_response(error.body, 500)
        finally:
            self._service.link.abort(reply.id)

    async def _collect_chat(self, answer: ChatAnswer) -> Json:
        async for event in events_with_fault(self._service, answer.reply):
            _raise_failed(event)
            answer.deltas(event)
        return answer.whole()

    async def _collect_completion(self, answer: CompletionAnswer) -> Json:
        async for event in events_with_fault(self._service, answer.reply):
            _raise_failed(event)
            answer.piece(event)
        return answer.whole()

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestError as error:
                return json_response(error.body, error.status)
            except WorkerDeadError as error:
                return json_response(error_body(f"the engine is dead: {error}", 503, "ServiceUnavailable"), 503)

        return run


def _raise_failed(event: Json) -> None:
    if "error" in event:
        raise _FailedError(event["error"], event.get("code"))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = error.detail if isinstance(error, HTTPException) else str(error)
    return json_response(
        error_body(f"{request.method} {request.url.path}: {what}", status, "invalid_request_error"), status
    )
