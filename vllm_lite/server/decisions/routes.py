"""The route of typed decisions."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.decisions import shared
from vllm_lite.client.decisions.answers import DecisionOutput
from vllm_lite.client.decisions.methods import messages_of, variables_of
from vllm_lite.client.decisions.questions import Question, read_instructions, read_questions, read_state
from vllm_lite.client.decisions.reads import Reads, make_reads
from vllm_lite.client.streams.stream import RequestStream, StreamFactory
from vllm_lite.errors import RequestError
from vllm_lite.server.calls.list_call import ListCall, Window, running
from vllm_lite.server.calls.style import AnswerStyle
from vllm_lite.server.decisions.bodies import DecisionBody
from vllm_lite.server.generation import Asked, Generation
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.auth import owner_of
from vllm_lite.server.http.body import memory_of
from vllm_lite.server.http.long_work import through
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.load_report import load_report
from vllm_lite.server.openai.bodies import ChatBody, ChatMessage, field_of
from vllm_lite.server.openai.errors import refused

PATH = "/v1/systemone"


class DecisionRoutes:
    """Answers each question by the logprobs of one token; the engine computes the questions in parallel."""

    def __init__(
        self, generation: Generation, factory: StreamFactory, window: Window, *, is_deterministic: bool
    ) -> None:
        """`is_deterministic`: the engine runs with --deterministic, so results do not depend on the schedule."""
        self._generation = generation
        self._factory = factory
        self._window = window
        self._is_deterministic = is_deterministic

    def routes(self) -> list[Route]:
        return posts({PATH: self.decide})

    async def decide(self, request: Request) -> Response:
        asked = await self._generation.read(request, DecisionBody)
        call = await self._started(asked)
        report = await load_report(request, self._generation.live.calls)
        return as_json(call, {**asked.headers, **report})

    async def _started(self, asked: Asked[DecisionBody]) -> dict[str, Any]:
        """Run a decision to its end, and return the response body."""
        body, request, live = asked.body, asked.request, self._generation.live
        call_id = await live.new_id("decision", body.request_id, request)
        style = AnswerStyle("decision", asked.model)
        call = ListCall[RequestStream](call_id, style, len(body.questions), self._window, owner_of(request, call_id))
        reads = await self._reads(asked, call.name)
        adapter = self._generation.model.adapter_of(asked.model)
        for stream in reads.streams:
            stream.adapter = adapter
        with running(live.calls, call, request.receive):
            await self._feed(call, reads.streams)
        with _refusing("questions"):
            found = reads.output()
        return self._answer(call, found)

    async def _feed(self, call: ListCall[RequestStream], streams: Sequence[RequestStream]) -> None:
        """Run the first question, which puts the state into the prefix cache, then the others as the window has
        room."""
        dispatcher = self._generation.live.calls.dispatcher
        waiting = list(reversed(streams))
        while not call.finished:
            call.check("questions")
            while waiting and call.has_room() and (not call.streams or call.streams[0].finished):
                call.add([waiting.pop()])
                dispatcher.add(call, len(call.streams) - 1)
            await call.wait()
        call.check("questions")

    async def _reads(self, asked: Asked[DecisionBody], name: str) -> Reads:
        """Render and tokenize the prompts. Raises ApiError."""
        body, prompts, live = asked.body, self._generation.prompts, self._generation.live
        size = memory_of(asked.request)
        with _refusing("state"):
            state = await through(size, lambda: read_state(body.state))
        with _refusing("instructions"):
            instructions = read_instructions(body.instructions)
        with _refusing("chat_template_kwargs"):
            variables = variables_of(body.chat_template_kwargs)
        with _refusing("questions"):
            questions = await through(size, lambda: read_questions(body.questions))
            has_template = prompts.has_template
            if has_template:
                text = await self._rendered(state, questions, instructions, variables, asked.request)
            else:
                text = shared.plain(state, questions, instructions)
            ids = [live.calls.stream_ids(f"{name}-{index}", 1)[0] for index in range(len(questions))]

            def made(_: object) -> Reads:
                return make_reads(self._factory, questions, text, body.params(), ids, has_template=has_template)

            return await prompts.tokenized(made, [text.begin, *text.rests], asked.request)

    async def _rendered(
        self, state: str, questions: Sequence[Question], instructions: str, variables: dict[str, Any], request: Request
    ) -> shared.SharedText:
        steps = shared.rendering(state, questions)
        said = next(steps)
        while True:
            messages = [ChatMessage(each["role"], each["content"]) for each in messages_of(said, instructions)]
            chat = ChatBody(messages=messages, chat_template_kwargs=variables)
            made = await self._generation.prompts.render(chat, None, request)
            try:
                said = steps.send(made.text)
            except StopIteration as end:
                text: shared.SharedText = end.value
                return text

    def _answer(self, call: ListCall[RequestStream], found: DecisionOutput) -> dict[str, Any]:
        usage = {
            "input_tokens": found.num_prompt_tokens,
            "output_tokens": len(found.answers),
            "input_tokens_details": {"cached_tokens": found.num_cached_tokens},
        }
        return {
            "id": call.id,
            "object": "structured_decision",
            "created": call.created,
            "model": call.style.model,
            "answers": found.answers,
            "usage": usage,
            "diagnostics": found.diagnostics,
            "deterministic": self._is_deterministic,
        }


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Turn errors of the client library into ApiErrors that name `field`, or the field that the error is about."""
    try:
        yield
    except RequestError as error:
        raise refused(error, field_of(str(error), field)) from error
