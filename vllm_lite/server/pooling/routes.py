"""The routes of vectors and scores."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from math import sqrt
from operator import mul
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_lite.client.llm_arguments import pairs_of
from vllm_lite.client.token_classes import BACKGROUND, EntityFinder
from vllm_lite.errors import RequestError
from vllm_lite.protocol.pooling import PoolingParams, PoolingTask
from vllm_lite.server.generation import Asked
from vllm_lite.server.http.application import posts
from vllm_lite.server.http.body import Endpoint
from vllm_lite.server.live_requests import as_json
from vllm_lite.server.openai.errors import ApiError, refused
from vllm_lite.server.pooling import answers
from vllm_lite.server.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TokenClassifyBody,
)
from vllm_lite.server.pooling.call import PoolingCall
from vllm_lite.server.pooling.runs import PoolingRuns

Method = Callable[[Asked[Any]], Awaitable[Response]]
PAIRS_AT_ONCE = 256
"""Number of similarities that are computed before the event loop runs other tasks."""
TEXTS_AT_ONCE = 4
"""The same for texts whose entities are decoded inline, with at most TOKENS_INLINE tokens each."""
TOKENS_INLINE = 512
NO_PAIRS = "scores no pairs"


class PoolingRoutes:
    def __init__(self, runs: PoolingRuns) -> None:
        self._runs = runs
        self._generation = runs.generation
        self._labels = runs.factory.limits.pooler.labels

    def routes(self) -> list[Route]:
        routes: list[tuple[str, type[Any], Method]] = [
            ("/v1/embeddings", EmbeddingBody, self.embeddings),
            ("/v2/embed", CohereEmbedBody, self.cohere),
            ("/pooling", PoolingBody, self.pooling),
            ("/classify", ClassifyBody, self.classify),
            *((path, TokenClassifyBody, self.token_classify) for path in ("/token_classify", "/v1/token_classify")),
            *((path, ScoreBody, self.score) for path in ("/score", "/v1/score")),
            *((path, RerankBody, self.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ]
        return posts({path: self._reading(kind, method) for path, kind, method in routes})

    async def invoked(self, request: Request, data: bytes, fields: Collection[str]) -> Response | None:
        """Answer a body by the route that its `fields` belong to; None if they belong to none. Raises ApiError."""
        kind: type[Any] = EmbeddingBody
        method: Method = self.embeddings
        if "query" in fields:
            kind, method = RerankBody, self.rerank
        elif not {"text_1", "data_1", "queries"}.isdisjoint(fields):
            kind, method = ScoreBody, self.score
        elif "task" in fields:
            kind, method = PoolingBody, self.pooling
        elif {"input", "messages"}.isdisjoint(fields) or not self._runs.factory.tasks:
            return None
        elif self._runs.factory.first_task == "token_classify":
            kind, method = TokenClassifyBody, self.token_classify
        elif self._runs.factory.first_task == "classify":
            kind, method = ClassifyBody, self.classify
        return await method(await self._generation.asked(request, data, kind))

    def _reading(self, kind: type[Any], method: Method) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await method(await self._generation.read(request, kind))

        return endpoint

    async def embeddings(self, asked: Asked[Any]) -> Response:
        body = asked.body
        params = body.params(dimensions=body.dimensions)
        prompts, asked = await self._runs.prompts_of(asked)
        call = await self._runs.pooled(asked, "embd", prompts, params, "embed")
        return self._vectors(asked, call, answers.embedding)

    async def cohere(self, asked: Asked[Any]) -> Response:
        """Answer with vectors in Cohere's format."""
        body = asked.body
        kinds = list(dict.fromkeys(body.embedding_types or ["float"]))
        size = body.output_dimension or self._runs.factory.limits.pooler.size
        if size % 8 and not {"binary", "ubinary"}.isdisjoint(kinds):
            text = f"binary and ubinary need vectors of a multiple of 8 numbers, and these have {size}"
            raise ApiError(400, text, "embedding_types")
        prompts, asked = await self._runs.cohere_prompts(asked)
        call = await self._runs.pooled(asked, "embd", prompts, body.params(), "embed")
        if body.truncate == "NONE" and body.max_tokens is not None:
            longest = max(len(stream.prompt.token_ids) for stream in call.streams)
            if longest > body.max_tokens:
                text = f"a text has {longest} tokens, over max_tokens of {body.max_tokens}; truncate it at START or END"
                raise ApiError(400, text, "max_tokens")
        units = {"input_tokens": call.num_prompt_tokens, "image_tokens": 0}
        found = {
            "id": call.id,
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": units},
            "response_type": "embeddings_by_type",
        }
        shown = {name: value for name, value in found.items() if value is not None}
        return answers.sent(call, asked.headers, shown, "embeddings", answers.typed(call, kinds))

    async def pooling(self, asked: Asked[Any]) -> Response:
        body = asked.body
        task = body.checked_task(self._runs.factory.first_task)
        params = body.params(dimensions=body.dimensions)
        prompts, asked = await self._runs.prompts_of(asked)
        call = await self._runs.pooled(asked, "pooling", prompts, params, task)
        return self._vectors(asked, call, answers.pooled)

    def _vectors(self, asked: Asked[Any], call: PoolingCall, write: Callable[..., Iterable[bytes]]) -> Response:
        """The answer in the requested encoding; `write` writes the numbers of one text."""
        way, encoding = asked.body.encoding_format, asked.body.encoding
        if way in ("bytes", "bytes_only"):
            model = asked.model if way == "bytes" else None
            return answers.binary_answer(call, asked.headers, encoding, model=model)
        item = partial(write, encoding=encoding if way == "base64" else None)
        return answers.answer(call, asked.headers, answers.fields(call, asked.model), item)

    async def token_classify(self, asked: Asked[Any]) -> Response:
        """Answer with the entities of texts, and the redacted texts."""
        self._check_serves("classifies no tokens", "token_classify")
        body = asked.body
        ignored = BACKGROUND if body.ignore_labels is None else body.ignore_labels
        try:
            finder = EntityFinder(
                self._runs.factory.limits.pooler, self._runs.factory.tokenizer, body.aggregation_strategy, ignored
            )
        except RequestError as error:
            raise refused(error, "aggregation_strategy") from error
        if body.redact and finder.aggregation == "none":
            raise ApiError(400, "redact needs entities, and aggregation_strategy none gives single tokens", "redact")
        call = await self._runs.placed(asked, "token-classify", body.texts, body.params(), body.stride)
        found = list[bytes]()
        for number, stream in enumerate(call.streams):  # the Viterbi path of a long text takes a second
            write = partial(answers.found_entities, stream, finder, redact=body.redact)
            is_long = len(stream.prompt.token_ids) > TOKENS_INLINE
            found.append(await asyncio.to_thread(write) if is_long else write())
            await _let_others_go_on(number, TEXTS_AT_ONCE)
        item = partial(answers.entities, found=found)
        return answers.answer(call, asked.headers, answers.fields(call, asked.model), item)

    def _check_serves(self, what: str, *tasks: PoolingTask) -> None:
        """Raise ApiError unless the model can do one of `tasks`; `what` names the missing ability."""
        able = self._runs.factory.tasks
        if not set(tasks) & set(able):
            named = f"it can be asked to {' or '.join(able)}" if able else "it generates text"
            raise ApiError(404, f"this model {what}: {named}", "model")

    async def classify(self, asked: Asked[Any]) -> Response:
        self._check_serves("classifies no texts", "classify")
        prompts, asked = await self._runs.prompts_of(asked)
        call = await self._runs.pooled(asked, "classify", prompts, asked.body.params(), "classify")
        item = partial(answers.classification, labels=self._labels)
        return answers.answer(call, asked.headers, answers.fields(call, asked.model), item)

    async def score(self, asked: Asked[Any]) -> Response:
        self._check_serves(NO_PAIRS, "score", "embed")
        body = asked.body
        try:
            pairs = await self._cut(pairs_of(*body.sides()), asked)
        except RequestError as error:
            raise refused(error, "text_2") from error
        call, scores = await self._scores(asked, "score", pairs, body.params(), body.instruction)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return as_json({**answers.fields(call, asked.model), "data": data}, asked.headers)

    async def rerank(self, asked: Asked[Any]) -> Response:
        """Answer with the best documents first, in the format of Jina and Cohere."""
        self._check_serves(NO_PAIRS, "score", "embed")
        body = asked.body
        if body.top_n is not None and body.top_n < 0:
            raise ApiError(400, f"top_n must be at least 1, or 0 for all, got {body.top_n}", "top_n")
        texts = body.texts
        pairs = await self._cut([(body.query, text) for text in texts], asked)
        call, scores = await self._scores(asked, "rerank", pairs, body.params(), body.instruction)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
        results: list[dict[str, Any]] = []
        for index in order:
            shown = {} if body.return_documents is False else {"document": {"text": texts[index]}}
            results.append({"index": index, "relevance_score": scores[index], **shown})
        found = answers.fields(call, asked.model)
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return as_json(
            {"id": call.id, "model": asked.model, "usage": found["usage"], "results": results, "meta": meta},
            asked.headers,
        )

    async def _cut(self, pairs: Sequence[tuple[str, str]], asked: Asked[Any]) -> Sequence[tuple[str, str]]:
        """Cut each side to its maximum number of tokens. Raises ApiError."""
        sides = []
        for side, name in enumerate(("max_tokens_per_query", "max_tokens_per_doc")):
            most = getattr(asked.body, name) or 0
            if most < 0:
                raise ApiError(400, f"{name} must be a non-negative integer, got {most}", name)
            texts = dict.fromkeys(pair[side] for pair in pairs)
            short = await self._generation.prompts.beginnings(list(texts), most, asked.request) if most else list(texts)
            sides.append(dict(zip(texts, short, strict=True)))
        return [(sides[0][first], sides[1][second]) for first, second in pairs]

    async def _scores(
        self,
        asked: Asked[Any],
        kind: str,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        instruction: str | None,
    ) -> tuple[PoolingCall, list[float]]:
        """Score pairs by the model's classification head, or by the cosine similarity of its vectors. Raises
        ApiError."""
        if "score" in self._runs.factory.tasks:
            call = await self._runs.scored(asked, kind, pairs, params, instruction)
            return call, [stream.numbers()[0] for stream in call.streams]
        places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        call = await self._runs.pooled(asked, kind, list(places), params, "embed")
        vectors = [memoryview(stream.data).cast("f") for stream in call.streams]  # Python floats would be larger
        lengths: list[float] = []
        for number, vector in enumerate(vectors):
            lengths.append(sqrt(sum(map(mul, vector, vector))))
            await _let_others_go_on(number)
        scores = []
        for number, (first, second) in enumerate(pairs):
            one, two = places[first], places[second]
            length = lengths[one] * lengths[two]
            scores.append(sum(map(mul, vectors[one], vectors[two])) / length if length else 0.0)
            await _let_others_go_on(number)
        return call, scores


async def _let_others_go_on(number: int, most: int = PAIRS_AT_ONCE) -> None:
    if number % most == most - 1:
        await asyncio.sleep(0)
