"""GrammarBuilder: makes the grammar that is sent to the engine of a request's constraints on its answer.

Most take less than a millisecond and the largest a second, mostly without the GIL, so threads do it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from starlette.requests import Request

from vllm_lite.errors import RequestError
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.http.disconnect import Threads
from vllm_lite.server.openai.bodies import changed
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.openai.formats import Formats
from vllm_lite.server.openai.forms import ToolsWanted, WantedForm

if TYPE_CHECKING:  # they import llguidance
    from vllm_lite.structured.calls.tools import CallGrammar
    from vllm_lite.structured.compile import CompiledGrammar

COMPILER = "vllm_lite.structured.compile"
"""Imported when first needed or earlier: the import takes 20 ms and more."""
NUM_THREADS = 2
T = TypeVar("T")
StrictLevel = Literal["auto", "function", "parameter"]


class HeldParams(NamedTuple):
    """Params with the grammar of the output, and the schema keywords that the grammar does not enforce, with their
    paths: `response_format #/a: 'pattern'`, `tools f #/properties/b: 'not'`."""

    params: SamplingParams
    notes: tuple[str, ...] = ()


class GrammarBuilder:
    """Makes the grammars of requests. `formats` are the model's, None for one without a tokenizer. `strict_level` is
    --tool-strict-level: the constraint on optional calls, in addition to the tools' own `strict`."""

    def __init__(self, formats: Formats | None, strict_level: StrictLevel = "auto") -> None:
        self._formats = formats
        self._strict_level = strict_level
        self._threads = Threads(NUM_THREADS, "grammar")

    async def held(
        self, params: SamplingParams, form: WantedForm | None, tools: ToolsWanted | None, request: Request
    ) -> HeldParams:
        """Return `params` with the grammar for `form` and for calls of `tools`. Raises ApiError.

        With forced calls no other form is possible. With optional calls, an output is either calls, or has the form.
        """
        is_held = tools is not None and (tools.is_forced or self._holds(tools))
        if form is None and not is_held:
            return HeldParams(params)
        if self._formats is None:
            field = "tools" if form is None else form.field
            raise ApiError(
                400, f"{field} needs a tokenizer to hold an answer to a form, and this model has none", field
            )
        grammar, notes = None, list[str]()
        if tools is not None:
            calls = await self._made(lambda: self._of_tools(tools, or_else=form is not None), "tools", request)
            grammar = calls.text
            notes += (f"tools {note}" for note in calls.notes)
        if form is not None and (tools is None or not tools.is_forced):
            calls_grammar = grammar
            compiled = await self._made(lambda: _of_form(form, calls_grammar), form.field, request)
            grammar = compiled.grammar
            notes += (f"{form.field} {note}" for note in compiled.notes)
        return HeldParams(params if grammar is None else changed(params, grammar=grammar), tuple(notes))

    def _holds(self, tools: ToolsWanted) -> bool:
        """Whether optional calls are constrained."""
        return self._strict_level != "auto" or any(tool.function.strict for tool in tools.allowed)

    async def _made(self, make: Callable[[], T], field: str, request: Request) -> T:
        def work(check: Callable[[], None]) -> T:
            check()
            return make()

        try:
            return await self._threads.run(work, request.receive)
        except RequestError as error:
            raise refused(error, field) from error

    def _of_tools(self, tools: ToolsWanted, *, or_else: bool) -> "CallGrammar":
        """The grammar of calls; with `or_else` they cannot be within a text."""
        from vllm_lite.structured.calls.tools import CallGrammar, Tool, tool_grammar

        if self._formats is None:
            return CallGrammar(None)
        functions = [tool.function for tool in tools.allowed]
        level = self._strict_level
        wanted = [Tool(each.name, each.parameters, bool(each.strict) or level == "parameter") for each in functions]
        added = self._formats.tokenizer.added_tokens
        choice = "required" if or_else and tools.mode == "auto" else tools.mode
        return tool_grammar(
            self._formats.shape(),
            wanted,
            choice,
            parallel=tools.parallel,
            is_held=level == "function",
            added_tokens=added,
        )


def _of_form(form: WantedForm, calls: str | None) -> "CompiledGrammar":
    from vllm_lite.structured.compile import compile_form, either

    compiled = compile_form(form.params)
    return compiled if calls is None else compiled._replace(grammar=either(calls, compiled.grammar))
