"""/openapi.json, made of the structs that bodies are decoded into."""

import re
from typing import Any, get_args, get_type_hints

import msgspec

from vllm_lite import __version__
from vllm_lite.protocol.operations import PauseMode, WakeTag
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.server.decisions.bodies import DecisionBody
from vllm_lite.server.http.auth import OPEN_PATHS
from vllm_lite.server.messages.bodies import CountTokensBody, MessagesBody
from vllm_lite.server.ollama.bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaModelBody,
    OllamaPromptBody,
)
from vllm_lite.server.openai import bodies
from vllm_lite.server.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TokenClassifyBody,
)
from vllm_lite.server.responses.bodies import ResponseBody
from vllm_lite.server.vllm.bodies import DerenderChatBody, DerenderCompletionBody

_ROUTES: tuple[tuple[str, str, str, type[msgspec.Struct] | None], ...] = (  # method, path, summary, body
    ("post", "/v1/chat/completions", "answer messages", bodies.ChatBody),
    ("post", "/v1/completions", "continue a prompt", bodies.CompletionBody),
    ("post", "/v1/responses", "answer input items; kept, in the background if asked", ResponseBody),
    ("post", "/v1/responses/input_tokens", "how many tokens that would read", ResponseBody),
    ("get", "/v1/responses/{response_id}", "a response, or its stream behind `starting_after`", None),
    ("delete", "/v1/responses/{response_id}", "end a response, and forget it", None),
    ("post", "/v1/responses/{response_id}/cancel", "end one that runs in the background", None),
    ("get", "/v1/responses/{response_id}/input_items", "what it was shown, page by page", None),
    ("post", "/v1/systemone", "answer typed questions about a state by probabilities", DecisionBody),
    ("get", "/v1/models", "what is served", None),
    ("get", "/v1/models/{model}", "one of them", None),
    ("post", "/v1/chat/completions/batch", "answer several chats, each with one choice", bodies.ChatsBody),
    ("post", "/inference/v1/generate", "continue token ids with token ids", bodies.GenerateBody),
    ("post", "/v1/chat/completions/render", "a chat as a body of /inference/v1/generate", bodies.ChatBody),
    ("post", "/v1/completions/render", "a completion as such bodies, one for each prompt", bodies.CompletionBody),
    ("post", "/v1/chat/completions/derender", "what was generated, as a chat's answer", DerenderChatBody),
    ("post", "/v1/completions/derender", "what was generated, as a completion's answer", DerenderCompletionBody),
    ("post", "/v1/messages/render", "messages of Anthropic's API as such a body", MessagesBody),
    ("post", "/v1/responses/render", "a response as such a body", ResponseBody),
    ("post", "/invocations", "a chat or a completion, as its fields say", bodies.ChatBody),
    ("post", "/v1/messages", "answer messages, as Anthropic's API", MessagesBody),
    ("post", "/v1/messages/count_tokens", "how many tokens their prompt has", CountTokensBody),
    ("post", "/api/chat", "answer messages, as Ollama's API", OllamaChatBody),
    ("post", "/api/generate", "answer a prompt, or continue it", OllamaGenerateBody),
    ("post", "/api/show", "the model, as Ollama's API", OllamaModelBody),
    ("get", "/api/tags", "what is served, as Ollama's API", None),
    ("get", "/api/ps", "what is loaded, as Ollama's API", None),
    ("get", "/api/version", "of this server, as Ollama's API", None),
    ("get", "/props", "the model, as llama.cpp's server", None),
    ("get", "/slots", "which rows of the batch are at work, as llama.cpp's server", None),
    ("post", "/v1/embeddings", "a vector for each text", EmbeddingBody),
    ("post", "/v2/embed", "a vector for each text, as Cohere's API", CohereEmbedBody),
    ("post", "/pooling", "what the model makes of each text: vectors, scores", PoolingBody),
    ("post", "/classify", "a number for each label of each text", ClassifyBody),
    ("post", "/token_classify", "entities in texts, and the texts without them", TokenClassifyBody),
    ("post", "/v1/token_classify", "as /token_classify", TokenClassifyBody),
    ("post", "/score", "how well texts go together, in pairs", ScoreBody),
    ("post", "/v1/score", "as /score", ScoreBody),
    ("post", "/rerank", "documents by how well they answer a query, as Jina's and Cohere's APIs", RerankBody),
    ("post", "/v1/rerank", "as /rerank", RerankBody),
    ("post", "/v2/rerank", "as /rerank", RerankBody),
    ("post", "/api/embed", "a vector for each text, as Ollama's API", OllamaEmbedBody),
    ("post", "/api/embeddings", "a vector of one text, as Ollama's older API", OllamaPromptBody),
    ("post", "/tokenize", "text or messages to token ids", bodies.TokenizeBody),
    ("post", "/detokenize", "token ids to text", bodies.DetokenizeBody),
    ("get", "/v1/requests/{request_id}", "how a request is, and why it waits", None),
    ("delete", "/v1/requests/{request_id}", "end a request", None),
    ("post", "/abort_requests", "end those of `request_ids`", bodies.AbortBody),
    ("post", "/v1/requests/{request_id}/fork", "branches of a request that runs, answered as that is", bodies.ForkBody),
    ("get", "/v1/requests/{request_id}/stream", "a resumable stream, behind the event of Last-Event-ID", None),
    ("get", "/health", "200 if a request would be served", None),
    ("get", "/health/live", "200 as long as the engine lives", None),
    ("get", "/health/ready", "as /health", None),
    ("get", "/ping", "as /health", None),
    ("get", "/version", "of this server", None),
    ("get", "/load", "how many requests run", None),
    ("get", "/metrics", "what Prometheus reads", None),
    ("get", "/server_info", "settings, and what they run on (admin)", None),
    ("post", "/v1/load_lora_adapter", "load a LoRA adapter from a folder (admin)", bodies.LoadAdapterBody),
    (
        "post",
        "/v1/unload_lora_adapter",
        "forget an adapter; what runs with it goes on (admin)",
        bodies.UnloadAdapterBody,
    ),
    ("post", "/reset_prefix_cache", "forget the KV of earlier prompts (admin)", None),
    ("post", "/pause", "compute nothing more, until /resume (admin)", None),
    ("post", "/resume", "compute again (admin)", None),
    ("get", "/is_paused", "whether nothing is computed because of that (admin)", None),
    ("post", "/sleep", "give back the memory of weights and KV cache, until /wake_up (admin)", None),
    ("post", "/wake_up", "load the model again (admin)", None),
    ("get", "/is_sleeping", "whether there is none (admin)", None),
    ("get", "/get_world_size", "how many workers there are (admin)", None),
    ("post", "/start_profile", "have workers profile their steps, as --profiler-config says (admin)", None),
    ("post", "/stop_profile", "end that, and have them write what they found (admin)", None),
    ("post", "/update_weights", "serve the weights in another folder (admin)", bodies.UpdateWeightsBody),
)
_MODE = {"type": "string", "enum": list(get_args(PauseMode)), "default": "abort"}
_QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/pause": {"mode": _MODE, "clear_cache": {"type": "boolean", "default": True}},
    "/sleep": {"level": {"type": "integer", "minimum": 0, "maximum": 2, "default": 1}, "mode": _MODE},
    "/get_world_size": {"include_dp": {"type": "boolean", "default": True}},
    "/wake_up": {"tags": {"type": "array", "items": {"type": "string", "enum": list(get_args(WakeTag))}}},
}
"""What stands behind the `?` of these paths."""
_ERROR_FORMS = (("/v1/messages", "AnthropicError"), ("/api/", "OllamaError"))
_WIDER = {"max_tokens", "seed", "stop"}
"""Fields of which a body takes more than SamplingParams does."""
_ERRORS = {
    "400": "the request is at fault; `param` names the field",
    "401": "no valid API key",
    "403": "an admin key is needed, or the server answers to no such name (Host) or page (Origin)",
    "404": "no such model, request or path",
    "408": "the body came too slowly, or the deadline of the request has passed",
    "409": "the request id is in use, the request to fork has finished, or another API server has the stream",
    "413": "the body is too long",
    "415": "the body is not JSON",
    "429": "too many requests wait",
    "500": "the server failed",
    "503": "nothing can be served now",
}

_EXAMPLES: dict[type[msgspec.Struct] | None, dict[str, Any]] = {
    bodies.ChatBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    bodies.ChatsBody: {"messages": [[{"role": "user", "content": "Tell me a story."}]], "max_tokens": 64},
    bodies.AbortBody: {"request_ids": ["ID"]},
    MessagesBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    CountTokensBody: {"messages": [{"role": "user", "content": "Tell me a story."}]},
    OllamaChatBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "options": {"num_predict": 64}},
    OllamaGenerateBody: {"prompt": "Tell me a story.", "options": {"num_predict": 64}},
    OllamaModelBody: {},
    ResponseBody: {"input": "Tell me a story.", "max_output_tokens": 64},
    EmbeddingBody: {"input": ["Roses are red.", "Violets are blue."]},
    CohereEmbedBody: {"texts": ["Roses are red.", "Violets are blue."], "embedding_types": ["float"]},
    PoolingBody: {"input": "Roses are red."},
    ClassifyBody: {"input": "Roses are red."},
    TokenClassifyBody: {"input": "Maria lives in New York.", "redact": True},
    ScoreBody: {"text_1": "What is red?", "text_2": ["Roses are.", "The sky is not."]},
    RerankBody: {"query": "What is red?", "documents": ["Roses are.", "The sky is not."]},
    OllamaEmbedBody: {"input": "Roses are red."},
    OllamaPromptBody: {"prompt": "Roses are red."},
    DecisionBody: {"state": "I was charged twice.", "questions": {"money": {"type": "noul", "instructions": "Money?"}}},
    bodies.CompletionBody: {"prompt": "Once upon a time", "max_tokens": 64},
    bodies.GenerateBody: {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 8}},
    bodies.UpdateWeightsBody: {"model": "/models/trained-further", "mode": "wait"},
    bodies.LoadAdapterBody: {"lora_name": "french", "lora_path": "/adapters/french"},
    bodies.UnloadAdapterBody: {"lora_name": "french"},
    bodies.TokenizeBody: {"prompt": "Once upon a time"},
    bodies.DetokenizeBody: {"tokens": [3, 4, 5]},
    bodies.ForkBody: {"n": 2},
    DerenderChatBody: {"generate_response": {"choices": [{"token_ids": [3, 4, 5], "finish_reason": "stop"}]}},
    DerenderCompletionBody: {"generate_responses": [{"choices": [{"token_ids": [3, 4, 5], "finish_reason": "stop"}]}]},
}


def document(root: str = "") -> dict[str, Any]:
    """Make the OpenAPI document. `root` is the path under which a proxy shows the server."""
    kinds = [kind for *_, kind in _ROUTES if kind is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    _add_bounds(schemas)
    fork = schemas["ForkBody"]["properties"]
    schemas["ForkBody"]["properties"] = {name: fork[name] for name in fork if name in bodies.fields_of(bodies.ForkBody)}
    code = {"type": ["integer", "string"]}
    error_fields = {"message": {"type": "string"}, "type": {"type": "string"}, "code": code}
    error = {"type": "object", "properties": {**error_fields, "param": {"type": ["string", "null"]}}}
    schemas["Error"] = {"type": "object", "properties": {"error": error}, "required": ["error"]}
    texts = {"type": {"type": "string"}, "message": {"type": "string"}}
    inner = {"type": "object", "properties": texts, "required": ["type", "message"]}
    schemas["AnthropicError"] = {**schemas["Error"], "properties": {"type": {"const": "error"}, "error": inner}}
    schemas["OllamaError"] = {**schemas["Error"], "properties": {"error": {"type": "string"}}}
    paths: dict[str, Any] = {}
    for method, path, summary, kind in _ROUTES:
        paths.setdefault(path, {})[method] = _route(path, summary, kind)
    components = {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": "vllm_lite", "version": __version__}
    servers = {"servers": [{"url": root}]} if root else {}
    return {"openapi": "3.1.0", "info": info, **servers, "paths": paths, "components": components}


def _add_bounds(schemas: dict[str, Any]) -> None:
    """Add the bounds of sampling fields, which bodies leave to SamplingParams."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    for name in set(bodies.SAMPLING) - _WIDER:
        bounded = msgspec.json.schema(hints[name] | None)
        for schema in schemas.values():
            if name in schema.get("properties", {}):
                schema["properties"][name] = {**bounded, "default": None}


def _route(path: str, summary: str, kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    form = next((name for start, name in _ERROR_FORMS if path.startswith(start)), "Error")
    reference = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
    errors = {code: {"description": text, "content": reference} for code, text in _ERRORS.items()}
    security: list[Any] = [] if path in OPEN_PATHS else [{}, {"key": []}]  # the first: where no keys are set
    route: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "done"}, **errors},
        "security": security,
    }
    if kind is not None:
        body: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        if kind in _EXAMPLES:
            body["example"] = _EXAMPLES[kind]
        route["requestBody"] = {"required": True, "content": {"application/json": body}}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(path, {}).items()]
    if parameters:
        route["parameters"] = parameters
    return route
