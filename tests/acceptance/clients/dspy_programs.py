"""DSPy: its LM, and a program of one typed question through the JSON adapter."""

from typing import Any

import dspy
from common import PROMPT, URL, check

there: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 60, "cache": False}
check(dspy.LM("openai/demo", **there)(PROMPT)[0])
answer = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}
schema = {"name": "answer", "schema": answer | {"additionalProperties": False}, "strict": True}
model = dspy.LM("openai/demo", **there, response_format={"type": "json_schema", "json_schema": schema})
with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
    check(dspy.Predict("question -> answer: bool")(question="Is a cat an animal?").answer in {True, False})
