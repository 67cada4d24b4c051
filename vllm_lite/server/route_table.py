"""The table of routes: body, summary, and use in batches of each.

/openapi.json, `run-batch` and the greeting of `serve` read it. The handlers are in the folder of each API.
"""

from typing import Any, Final, NamedTuple

import msgspec

from vllm_lite.server.decisions.bodies import DecisionBody
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
    TableRoute("post", "/v1/responses", "answer input items; kept, in the background if asked", ResponseBody),
    TableRoute("post", "/v1/responses/input_tokens", "how many tokens that would read", ResponseBody),
    TableRoute("get", "/v1/responses/{response_id}", "a response, or its stream behind `starting_after`"),
    TableRoute("delete", "/v1/responses/{response_id}", "end a response, and forget it"),
    TableRoute("post", "/v1/responses/{response_id}/cancel", "end one that runs in the background"),
    TableRoute("get", "/v1/responses/{response_id}/input_items", "what it was shown, page by page"),
    TableRoute(
        "post", "/v1/systemone", "answer typed questions about a state by probabilities", DecisionBody, batch=OWN_BODY
    ),
    TableRoute("get", "/v1/models", "what is served"),
    TableRoute("get", "/v1/models/{model}", "one of them"),
    TableRoute("post", "/v1/chat/completions/batch", "answer several chats, each with one choice", bodies.ChatsBody),
    TableRoute("post", "/inference/v1/generate", "continue token ids with token ids", bodies.GenerateBody),
    TableRoute("post", "/v1/chat/completions/render", "a chat as a body of /inference/v1/generate", bodies.ChatBody),
    TableRoute(
        "post", "/v1/completions/render", "a completion as such bodies, one for each prompt", bodies.CompletionBody
    ),
    TableRoute("post", "/v1/chat/completions/derender", "what was generated, as a chat's answer", DerenderChatBody),
    TableRoute(
        "post", "/v1/completions/derender", "what was generated, as a completion's answer", DerenderCompletionBody
    ),
    TableRoute("post", "/v1/messages/render", "messages of Anthropic's API as such a body", MessagesBody),
    TableRoute("post", "/v1/responses/render", "a response as such a body", ResponseBody),
    TableRoute("post", "/invocations", "a chat or a completion, as its fields say", bodies.ChatBody),
    TableRoute("post", "/v1/messages", "answer messages, as Anthropic's API", MessagesBody),
    TableRoute("post", "/v1/messages/count_tokens", "how many tokens their prompt has", CountTokensBody),
    TableRoute("post", "/api/chat", "answer messages, as Ollama's API", OllamaChatBody),
    TableRoute("post", "/api/generate", "answer a prompt, or continue it", OllamaGenerateBody),
    TableRoute("post", "/api/show", "the model, as Ollama's API", OllamaModelBody),
    TableRoute("get", "/api/tags", "what is served, as Ollama's API"),
    TableRoute("get", "/api/ps", "what is loaded, as Ollama's API"),
    TableRoute("get", "/api/version", "of this server, as Ollama's API"),
    TableRoute("get", "/props", "the model, as llama.cpp's server"),
    TableRoute("get", "/slots", "which rows of the batch are at work, as llama.cpp's server"),
    TableRoute("post", "/v1/embeddings", "a vector for each text", EmbeddingBody, batch="input"),
    TableRoute("post", "/v2/embed", "a vector for each text, as Cohere's API", CohereEmbedBody),
    TableRoute("post", "/pooling", "what the model makes of each text: vectors, scores", PoolingBody, batch="input"),
    TableRoute("post", "/classify", "a number for each label of each text", ClassifyBody, batch="input"),
    TableRoute(
        "post", "/token_classify", "entities in texts, and the texts without them", TokenClassifyBody, batch=OWN_BODY
    ),
    TableRoute("post", "/v1/token_classify", "as /token_classify", TokenClassifyBody, batch=OWN_BODY),
    TableRoute("post", "/score", "how well texts go together, in pairs", ScoreBody, batch=OWN_BODY),
    TableRoute("post", "/v1/score", "as /score", ScoreBody, batch=OWN_BODY),
    TableRoute(
        "post",
        "/rerank",
        "documents by how well they answer a query, as Jina's and Cohere's APIs",
        RerankBody,
        batch=OWN_BODY,
    ),
    TableRoute("post", "/v1/rerank", "as /rerank", RerankBody, batch=OWN_BODY),
    TableRoute("post", "/v2/rerank", "as /rerank", RerankBody, batch=OWN_BODY),
    TableRoute("post", "/api/embed", "a vector for each text, as Ollama's API", OllamaEmbedBody),
    TableRoute("post", "/api/embeddings", "a vector of one text, as Ollama's older API", OllamaPromptBody),
    TableRoute("post", "/tokenize", "text or messages to token ids", bodies.TokenizeBody),
    TableRoute("post", "/detokenize", "token ids to text", bodies.DetokenizeBody),
    TableRoute("get", "/v1/requests/{request_id}", "how a request is, and why it waits"),
    TableRoute("delete", "/v1/requests/{request_id}", "end a request"),
    TableRoute("post", "/abort_requests", "end those of `request_ids`", bodies.AbortBody),
    TableRoute(
        "post",
        "/v1/requests/{request_id}/fork",
        "branches of a request that runs, answered as that is",
        bodies.ForkBody,
    ),
    TableRoute("get", "/v1/requests/{request_id}/stream", "a resumable stream, behind the event of Last-Event-ID"),
    TableRoute("get", "/health", "200 if a request would be served"),
    TableRoute("get", "/health/live", "200 as long as the engine lives"),
    TableRoute("get", "/health/ready", "as /health"),
    TableRoute("get", "/ping", "as /health"),
    TableRoute("get", "/version", "of this server"),
    TableRoute("get", "/load", "how many requests run"),
    TableRoute("get", "/metrics", "what Prometheus reads"),
    TableRoute("get", "/server_info", "settings, and what they run on (admin)"),
    TableRoute("post", "/v1/load_lora_adapter", "load a LoRA adapter from a folder (admin)", bodies.LoadAdapterBody),
    TableRoute(
        "post",
        "/v1/unload_lora_adapter",
        "forget an adapter; what runs with it goes on (admin)",
        bodies.UnloadAdapterBody,
    ),
    TableRoute("post", "/reset_prefix_cache", "forget the KV of earlier prompts (admin)"),
    TableRoute("post", "/pause", "compute nothing more, until /resume (admin)"),
    TableRoute("post", "/resume", "compute again (admin)"),
    TableRoute("get", "/is_paused", "whether nothing is computed because of that (admin)"),
    TableRoute("post", "/sleep", "give back the memory of weights and KV cache, until /wake_up (admin)"),
    TableRoute("post", "/wake_up", "load the model again (admin)"),
    TableRoute("get", "/is_sleeping", "whether there is none (admin)"),
    TableRoute("get", "/get_world_size", "how many workers there are (admin)"),
    TableRoute("post", "/start_profile", "have workers profile their steps, as --profiler-config says (admin)"),
    TableRoute("post", "/stop_profile", "end that, and have them write what they found (admin)"),
    TableRoute("post", "/update_weights", "serve the weights in another folder (admin)", bodies.UpdateWeightsBody),
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
