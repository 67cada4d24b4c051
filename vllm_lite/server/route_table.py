"""The table of routes: body, summary, and use in batches of each.

/openapi.json, `run-batch` and the greeting of `serve` read it. The handlers are in the folder of each API.
"""

from typing import Any, Final, NamedTuple

import msgspec

from vllm_lite.server.decisions.bodies import DecisionBody
from vllm_lite.server.llama_server.bodies import LlamaCppCompletionBody, LlamaCppInfillBody
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

OWN_BODY: Final = ""


class TableRoute(NamedTuple):
    """A route, without a proxy's root path."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    batch: str | None = None
    """The field of the body that takes the prompt of a batch row that names this route. OWN_BODY: no single field does,
    so rows have whole bodies. None: rows must not name this route."""


ROUTES: Final = (
    TableRoute("post", "/v1/chat/completions", "answer messages", bodies.ChatBody, batch="messages"),
    TableRoute("post", "/v1/completions", "continue a prompt", bodies.CompletionBody, batch="prompt"),
    TableRoute(
        "post",
        "/v1/responses",
        "answer input items; the response is stored, and may run in the background",
        ResponseBody,
    ),
    TableRoute("post", "/v1/responses/input_tokens", "count the input tokens of a response", ResponseBody),
    TableRoute("get", "/v1/responses/{response_id}", "a stored response, or its events after `starting_after`"),
    TableRoute("delete", "/v1/responses/{response_id}", "end a response and delete it"),
    TableRoute("post", "/v1/responses/{response_id}/cancel", "end a response that runs in the background"),
    TableRoute("get", "/v1/responses/{response_id}/input_items", "the input items of a response, in pages"),
    TableRoute(
        "post", "/v1/systemone", "answer typed questions about a state by probabilities", DecisionBody, batch=OWN_BODY
    ),
    TableRoute("get", "/v1/models", "list the served models and adapters"),
    TableRoute("get", "/v1/models/{model}", "one served model or adapter"),
    TableRoute("post", "/v1/chat/completions/batch", "answer several chats, each with one choice", bodies.ChatsBody),
    TableRoute("post", "/inference/v1/generate", "continue token ids with token ids", bodies.GenerateBody),
    TableRoute(
        "post", "/v1/chat/completions/render", "render a chat to a body of /inference/v1/generate", bodies.ChatBody
    ),
    TableRoute(
        "post",
        "/v1/completions/render",
        "render a completion to such bodies, one for each prompt",
        bodies.CompletionBody,
    ),
    TableRoute(
        "post", "/v1/chat/completions/derender", "turn generated tokens into the answer of a chat", DerenderChatBody
    ),
    TableRoute(
        "post",
        "/v1/completions/derender",
        "turn generated tokens into the answer of a completion",
        DerenderCompletionBody,
    ),
    TableRoute("post", "/v1/messages/render", "render messages of Anthropic's API to such a body", MessagesBody),
    TableRoute("post", "/v1/responses/render", "render a response to such a body", ResponseBody),
    TableRoute(
        "post",
        "/invocations",
        "answer a chat, a completion or a pooling request, depending on the fields",
        bodies.ChatBody,
    ),
    TableRoute("post", "/v1/messages", "answer messages, as Anthropic's API", MessagesBody),
    TableRoute("post", "/v1/messages/count_tokens", "count the prompt tokens of messages", CountTokensBody),
    TableRoute("post", "/api/chat", "answer messages, as Ollama's API", OllamaChatBody),
    TableRoute("post", "/api/generate", "answer or continue a prompt, as Ollama's API", OllamaGenerateBody),
    TableRoute("post", "/api/show", "describe the model, as Ollama's API", OllamaModelBody),
    TableRoute("post", "/api/pull", "succeed if the model is served, as Ollama's API", OllamaModelBody),
    TableRoute("get", "/api/tags", "list the served models, as Ollama's API"),
    TableRoute("get", "/api/ps", "list the loaded models, as Ollama's API"),
    TableRoute("get", "/api/version", "the version of this server, as Ollama's API"),
    TableRoute("post", "/completion", "continue prompts, as llama.cpp's server", LlamaCppCompletionBody),
    TableRoute("post", "/infill", "fill the gap between two texts, as llama.cpp's server", LlamaCppInfillBody),
    TableRoute("post", "/apply-template", "the prompt of a chat as text, as llama.cpp's server", bodies.ChatBody),
    TableRoute("get", "/props", "describe the model, as llama.cpp's server"),
    TableRoute("get", "/slots", "the rows of the batch and whether they are in use, as llama.cpp's server"),
    TableRoute("post", "/v1/embeddings", "a vector for each text", EmbeddingBody, batch="input"),
    TableRoute("post", "/v2/embed", "a vector for each text, as Cohere's API", CohereEmbedBody),
    TableRoute("post", "/pooling", "the pooled output of each text: vectors or scores", PoolingBody, batch="input"),
    TableRoute("post", "/classify", "the probability of each label for each text", ClassifyBody, batch="input"),
    TableRoute(
        "post", "/token_classify", "find entities in texts, and redact them if asked", TokenClassifyBody, batch=OWN_BODY
    ),
    TableRoute("post", "/v1/token_classify", "as /token_classify", TokenClassifyBody, batch=OWN_BODY),
    TableRoute("post", "/score", "score pairs of texts by similarity or relevance", ScoreBody, batch=OWN_BODY),
    TableRoute("post", "/v1/score", "as /score", ScoreBody, batch=OWN_BODY),
    TableRoute(
        "post",
        "/rerank",
        "sort documents by relevance to a query, as Jina's and Cohere's APIs",
        RerankBody,
        batch=OWN_BODY,
    ),
    TableRoute("post", "/v1/rerank", "as /rerank", RerankBody, batch=OWN_BODY),
    TableRoute("post", "/v2/rerank", "as /rerank", RerankBody, batch=OWN_BODY),
    TableRoute("post", "/api/embed", "a vector for each text, as Ollama's API", OllamaEmbedBody),
    TableRoute("post", "/api/embeddings", "a vector of one text, as Ollama's older API", OllamaPromptBody),
    TableRoute("post", "/tokenize", "convert text or messages to token ids", bodies.TokenizeBody),
    TableRoute("post", "/detokenize", "convert token ids to text", bodies.DetokenizeBody),
    TableRoute("get", "/v1/requests/{request_id}", "the state of a request, and why it waits"),
    TableRoute(
        "post", "/debug/prefix", "which tokens of a prompt are cached, and why not all (admin)", bodies.ChatBody
    ),
    TableRoute("delete", "/v1/requests/{request_id}", "end a request"),
    TableRoute("post", "/abort_requests", "end the requests in `request_ids`", bodies.AbortBody),
    TableRoute("post", "/inference/v1/abort_requests", "as /abort_requests", bodies.AbortBody),
    TableRoute(
        "post",
        "/v1/requests/{request_id}/fork",
        "start branches of a running request, answered in its format",
        bodies.ForkBody,
    ),
    TableRoute("get", "/v1/requests/{request_id}/stream", "resume a stream after the event in Last-Event-ID"),
    TableRoute("get", "/health", "200 if the server can answer a request now"),
    TableRoute("get", "/health/live", "200 as long as the engine is alive"),
    TableRoute("get", "/health/ready", "as /health"),
    TableRoute("get", "/ping", "as /health"),
    TableRoute("get", "/version", "the version of this server"),
    TableRoute("get", "/load", "the number of running requests"),
    TableRoute("get", "/metrics", "metrics for Prometheus"),
    TableRoute("get", "/server_info", "settings and environment of the server (admin)"),
    TableRoute("post", "/v1/load_lora_adapter", "load a LoRA adapter from a folder (admin)", bodies.LoadAdapterBody),
    TableRoute(
        "post",
        "/v1/unload_lora_adapter",
        "unload an adapter; running requests with it continue (admin)",
        bodies.UnloadAdapterBody,
    ),
    TableRoute("post", "/reset_prefix_cache", "empty the prefix cache (admin)"),
    TableRoute("post", "/pause", "stop computing until /resume (admin)"),
    TableRoute("post", "/resume", "continue after /pause (admin)"),
    TableRoute("get", "/is_paused", "whether the engine is paused (admin)"),
    TableRoute("post", "/sleep", "free the memory of weights and KV cache until /wake_up (admin)"),
    TableRoute("post", "/wake_up", "load the model again after /sleep (admin)"),
    TableRoute("get", "/is_sleeping", "whether the engine sleeps (admin)"),
    TableRoute("get", "/get_world_size", "the number of workers (admin)"),
    TableRoute("post", "/start_profile", "start profiling steps on the workers, with --profiler-config (admin)"),
    TableRoute("post", "/stop_profile", "stop profiling and write the results (admin)"),
    TableRoute(
        "post", "/update_weights", "load and serve the weights in another folder (admin)", bodies.UpdateWeightsBody
    ),
)

EXAMPLES: Final[dict[type[msgspec.Struct] | None, dict[str, Any]]] = {
    bodies.ChatBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    bodies.ChatsBody: {"messages": [[{"role": "user", "content": "Tell me a story."}]], "max_tokens": 64},
    bodies.AbortBody: {"request_ids": ["ID"]},
    MessagesBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64},
    CountTokensBody: {"messages": [{"role": "user", "content": "Tell me a story."}]},
    OllamaChatBody: {"messages": [{"role": "user", "content": "Tell me a story."}], "options": {"num_predict": 64}},
    OllamaGenerateBody: {"prompt": "Tell me a story.", "options": {"num_predict": 64}},
    OllamaModelBody: {},
    LlamaCppCompletionBody: {"prompt": "Once upon a time", "n_predict": 64},
    LlamaCppInfillBody: {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
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
"""Example bodies, by body type."""


def example_of(path: str) -> dict[str, Any]:
    """The example body of a POST route."""
    return next(EXAMPLES[route.body] for route in ROUTES if route.path == path and route.method == "post")
