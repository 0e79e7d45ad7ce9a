"""From a checked request to the worker and back: prompts, limits, planted faults, and each request's events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import soakrig
from soakrig.engine.offload.counters import History
from soakrig.engine.offload.metrics import OffloadMetrics
from soakrig.engine.offload.plan import OffloadPlan

from .chat_template import ChatTemplate
from .config import VOCABULARY, EngineConfig
from .grammar import SchemaError, check
from .link import DEAD, Event, WorkerDeadError, WorkerLink
from .metrics import Metrics
from .plant import PlantAction, PlantClock
from .reply_script import ReplySpec
from .request_body import ChatRequest, CompletionRequest, Generation, Message, NamedTool, RequestError, Tool
from .sampling import SamplingParams
from .settings import Settings
from .tokenizer import Tokenizer

COMPLETION_TOKENS = 16
REPEATED = "!"


class EngineDeadError(Exception):
    """The worker died under a request that was under way."""


@dataclass(slots=True)
class Reply:
    """A request that the worker has, or one that a planted fault answers without it (``queue`` None)."""

    id: str
    prompt: list[int]
    max_tokens: int
    queue: asyncio.Queue[Event] | None
    planted: PlantAction | None = None


@dataclass(slots=True)
class _Arrival:
    at: float
    first_seen: bool = False


class Service:
    """The engine as the HTTP routes see it."""

    def __init__(self, config: EngineConfig, settings: Settings, plan: OffloadPlan) -> None:
        self.config = config
        self.settings = settings
        self.plan = plan
        self.history = History(len(plan.model.layers))
        self.tokenizer = Tokenizer()
        self.metrics = Metrics(config.served_model_name)
        self.metrics.add(OffloadMetrics(config.served_model_name, plan, self.history.whole))
        self._template = ChatTemplate(self.tokenizer)
        self._loop = asyncio.get_running_loop()
        # One thread: prompts are made in order of arrival, and a long one does not stop the loop.
        self._prompts = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._arrivals: dict[str, _Arrival] = {}
        plant = settings.plant
        self.plant = PlantClock(plant, holds=settings.hold(plant.when)) if plant else None
        self.link = WorkerLink(config, plan, self._on_report)

    @property
    def simulated(self) -> bool:
        return self.plant is not None

    @property
    def fingerprint(self) -> str:
        seed = self.config.weights_seed
        return f"soakrig-embedded-{soakrig.__version__}-{seed}" + ("-planted" if self.simulated else "")

    async def prompt(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        *,
        thinking: bool,
        generation: bool,
        extra: dict[str, Any],
    ) -> list[int]:
        """The token ids of a conversation. Raises RequestError where it cannot be rendered."""
        rendered = [_message(message) for message in messages]
        definitions = [tool.function.model_dump(exclude_none=True) for tool in tools or ()]
        variables = {name: value for name, value in extra.items() if name != "enable_thinking"}

        def render() -> list[int]:
            return self._template.render(
                rendered, definitions, enable_thinking=thinking, add_generation_prompt=generation, extra=variables
            )

        try:
            return await self._loop.run_in_executor(self._prompts, render)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error

    async def encode(self, text: str) -> list[int]:
        return await self._loop.run_in_executor(self._prompts, self.tokenizer.encode, text)

    async def chat(self, request: ChatRequest) -> Reply:
        """Start a chat request. Raises RequestError (refused) or WorkerDeadError."""
        self._check_model(request.model)
        arrived = self._loop.time()
        tools = request.tools if request.tool_choice != "none" else None
        for number, tool in enumerate(request.tools or ()):
            try:
                where = f"tools.{number}.function.parameters"
                check(tool.function.parameters or {}, where=where)
                if (kind := (tool.function.parameters or {}).get("type", "object")) != "object":
                    raise SchemaError(f"{where}.type is {kind!r}, object was expected")
            except SchemaError as error:
                raise RequestError(str(error), param="tools") from error
        prompt = await self.prompt(
            request.messages,
            request.tools,
            thinking=request.thinking,
            generation=True,
            extra=request.chat_template_kwargs or {},
        )
        max_tokens = self._limit(len(prompt), request.limit)
        action = self.plant.turn(len(prompt), request.limit, len(request.tools or ())) if self.plant else None
        if isinstance(request.tool_choice, NamedTool):
            wanted = request.tool_choice.function.name
            tools = [tool for tool in tools or () if tool.function.name == wanted]
        spec = ReplySpec(
            thinking=request.thinking,
            tools=[{"name": t.function.name, "parameters": t.function.parameters or {}} for t in tools or ()],
            call=True if isinstance(request.tool_choice, NamedTool) or request.tool_choice == "required" else None,
            text_tokens=max_tokens if request.ignore_eos else None,
            min_tokens=request.min_tokens,
            one_token=self.tokenizer.encode(REPEATED)[0] if action == "one_token" else None,
        )
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        return self._submit("chatcmpl", request, prompt, max_tokens, spec, logprobs, arrived, action)

    async def completion(self, request: CompletionRequest) -> Reply:
        """Start a completion: free text up to ``max_tokens``. Raises as ``chat``."""
        self._check_model(request.model)
        arrived = self._loop.time()
        if isinstance(request.prompt, str):
            prompt = await self.encode(request.prompt)
        else:
            prompt = [token for token in request.prompt if isinstance(token, int)]
            outside = next((token for token in prompt if token >= VOCABULARY), None)
            if outside is not None:
                raise RequestError(f"prompt holds token {outside}, ids go up to {VOCABULARY - 1}", param="prompt")
        if not prompt:
            raise RequestError("the prompt is empty; at least one token was expected", param="prompt")
        wanted = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        max_tokens = self._limit(len(prompt), wanted)
        # One token more than may be written, so that the end is the limit's and not the script's.
        spec = ReplySpec(text_tokens=max_tokens + 1)
        return self._submit("cmpl", request, prompt, max_tokens, spec, request.logprobs, arrived, None)

    async def events(self, reply: Reply) -> AsyncIterator[Event]:
        """A request's events up to its end. Raises EngineDeadError when the worker dies under it."""
        queue = reply.queue
        while queue is not None:
            event = await queue.get()
            if event is DEAD:
                raise EngineDeadError(self.link.how_ended)
            yield event
            if "finish" in event or "error" in event:
                self.link.forget(reply.id)
                return

    def close(self) -> None:
        self._prompts.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        prefix: str,
        request: Generation,
        prompt: list[int],
        max_tokens: int,
        spec: ReplySpec,
        logprobs: int | None,
        arrived: float,
        action: PlantAction | None,
    ) -> Reply:
        if not self.link.alive:
            raise WorkerDeadError(self.link.how_ended)
        identity = f"{prefix}-{uuid.uuid4().hex}"
        if action == "empty_200":
            return Reply(identity, prompt, max_tokens, None, action)
        sampling = SamplingParams(request.temperature, request.top_p, max(request.top_k, 0), request.seed)
        self._arrivals[identity] = _Arrival(arrived)
        queue = self.link.add(
            {
                "id": identity,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "sampling": asdict(sampling),
                "reply": asdict(spec),
                "logprobs": logprobs,
                "prompt_logprobs": request.prompt_logprobs,
                "stop": request.stop,
                "planted": action == "bad_expert_id",
            }
        )
        return Reply(identity, prompt, max_tokens, queue, action)

    def _limit(self, prompt: int, wanted: int | None) -> int:
        """Tokens that the reply may have. Raises RequestError with both numbers where they do not fit."""
        for limit, what in (
            (self.config.max_model_len, "the maximum context length"),
            (self.config.limit, "the KV cache's budget"),
        ):
            total = prompt + (1 if wanted is None else wanted)
            if total > limit:
                raise RequestError(
                    f"{what} is {limit} tokens, but {total} were requested ({prompt} of prompt and "
                    f"{total - prompt} of reply); shorten the messages or lower max_tokens",
                    param="messages",
                    code="context_length_exceeded",
                )
        return self.config.limit - prompt if wanted is None else wanted

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.config.served_model_name:
            raise RequestError(
                f"the model {name!r} does not exist here; this engine serves {self.config.served_model_name!r}",
                status=404,
                kind="NotFoundError",
                param="model",
            )

    def _on_report(self, message: dict[str, Any]) -> None:
        self.metrics.report(message)
        offload = message["offload"]
        if offload is not None and offload["step"] > self.history.step:  # an abort is reported without a step
            self.history.add(offload["step"], offload["counters"])
        for event in message["events"]:
            arrival = self._arrivals.get(event["id"])
            if arrival is None:
                continue
            if not arrival.first_seen and event.get("n"):
                arrival.first_seen = True
                self.metrics.first_token(self._loop.time() - arrival.at)
            reason = "error" if "error" in event else event.get("finish")
            if reason is not None:
                del self._arrivals[event["id"]]
                self.metrics.finished(reason, self._loop.time() - arrival.at)


def _message(message: Message) -> dict[str, Any]:
    """A message as the template takes it."""
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
        "reasoning": message.reasoning or message.reasoning_content or "",
        "tool_calls": [
            {"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()
        ],
    }
