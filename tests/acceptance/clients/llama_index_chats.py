"""LlamaIndex: a completion, a chat, a stream, a form by a tool, vectors of texts."""

from typing import Any, Literal

from common import PROMPT, URL, check
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Cat(BaseModel):
    name: Literal["Tom", "Mia"]
    age: Literal[1, 2, 3]


there: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none"}
model = OpenAILike(model="demo", is_chat_model=True, is_function_calling_model=True, max_tokens=60, **there)
check(model.complete(PROMPT).text)
check(model.chat([ChatMessage(role="user", content=PROMPT)]).message.content)
check("".join(part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content=PROMPT)])))
check(OpenAILike(model="demo", is_chat_model=False, max_tokens=8, **there).complete("Once upon a time").text)
check(model.as_structured_llm(Cat).complete("A cat.").raw)
vectors = OpenAILikeEmbedding(model_name="demo", embed_batch_size=2, **there)
check(len(vectors.get_text_embedding_batch(["a cat", "a dog", "a boat"])) == 3)
