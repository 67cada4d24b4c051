"""smolagents: a CodeAgent with one tool."""

import os
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, tool


@tool  # type: ignore[untyped-decorator]  # it has no types
def write_greeting(text: str) -> str:
    """Write a greeting to hello.txt.

    Args:
        text: what it says
    """
    Path("hello.txt").write_text(text)
    return "written"


model = OpenAIModel(os.environ["TRY_MODEL"], api_base=os.environ["TRY_URL"] + "/v1", api_key="none")
print(CodeAgent([write_greeting], model).run(os.environ["TRY_PROMPT"]))
