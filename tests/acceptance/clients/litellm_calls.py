"""LiteLLM: chats, streams, tools and a form by two providers (openai, hosted_vllm), responses, vectors, a ranking."""

import litellm
from common import PROMPT, SCHEMA, TOOL, URL, check

there = {"api_base": f"{URL}/v1", "api_key": "none"}
asked = [{"role": "user", "content": PROMPT}]
form = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}
for model in ("openai/demo", "hosted_vllm/demo"):
    ask = {"model": model, "messages": asked, "max_tokens": 60, **there}
    check(litellm.completion(**ask).choices[0].message.content)
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
    check("".join(parts))
    check(litellm.completion(**ask, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls)
    check(litellm.completion(**ask, response_format=form).choices[0].message.content)
    check(len(litellm.embedding(model=model, input=["a cat", "a dog"], **there).data) == 2)
check(
    litellm.text_completion(model="text-completion-openai/demo", prompt="Once", max_tokens=8, **there).choices[0].text
)
check(litellm.responses(model="openai/demo", input=PROMPT, max_output_tokens=16, **there).output)
ranked = litellm.rerank(model="hosted_vllm/demo", query="cat", documents=["a cat", "a boat"], **there)
check(len(ranked.results) == 2)
