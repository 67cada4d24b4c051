"""Let a model call a function, with OpenAI's client: examples/tool_calls.py http://127.0.0.1:8000/v1 "What is 3 + 4?"

The call is streamed; its arguments hold to the schema, as the tool is `strict`.
"""

import argparse
import json
import sys
from typing import Any

import openai

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": -999, "maximum": 999} for name in ("a", "b")},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url", help="of a running `vllm-lite serve`, with /v1")
    parser.add_argument("prompt", nargs="?", default="What is 3 + 4?")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": args.prompt}]
    settings: dict[str, Any] = {"model": model, "tools": [ADD], "max_tokens": 200}
    with client.chat.completions.stream(messages=messages, tool_choice="required", **settings) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                print(event.arguments_delta, end="", flush=True)
        message = stream.get_final_completion().choices[0].message
    print()
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        result = arguments["a"] + arguments["b"]
        print(f"{call.function.name}({arguments['a']}, {arguments['b']}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    answer = client.chat.completions.create(messages=messages, tool_choice="none", **settings)
    print(answer.choices[0].message.content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
