"""LangChain over three dialects: a message, a stream, tools, a form, vectors."""

from typing import Any

from common import PROMPT, SCHEMA, TOOL, URL, check
from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

there: dict[str, Any] = {"model": "demo", "base_url": f"{URL}/v1", "api_key": "none"}
chat = ChatOpenAI(**there, max_completion_tokens=60)
check(chat.invoke(PROMPT).content)
check([part.content for part in chat.stream(PROMPT) if part.content])
check(chat.bind_tools([TOOL], tool_choice="feed").invoke("Feed Tom.").tool_calls)
form = {"title": "Cat", "description": "A cat.", **SCHEMA}
check(chat.with_structured_output(form, method="json_schema").invoke("A cat."))
check(OpenAI(**there, max_tokens=8).invoke("Once upon a time"))
check(len(OpenAIEmbeddings(**there, check_embedding_ctx_length=False).embed_documents(["a cat", "a dog"])) == 2)
check(ChatAnthropic(model="demo", base_url=URL, api_key="none", max_tokens=16).invoke(PROMPT).content)
check(ChatOllama(model="demo", base_url=URL, num_predict=16).invoke(PROMPT).content)
