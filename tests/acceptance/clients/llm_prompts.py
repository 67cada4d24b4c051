"""llm: a prompt, a stream and a schema, with a model of extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path

from common import PROMPT, SCHEMA, URL, check

Path("extra-openai-models.yaml").write_text(
    f"- {{model_id: here, model_name: demo, api_base: '{URL}/v1', supports_schema: true}}\n"
)


def ask(*words: str) -> str:
    command = [sys.executable, "-m", "llm", "prompt", "-m", "here", "-o", "max_tokens", "60", *words]
    env = {**os.environ, "LLM_USER_PATH": str(Path.cwd()), "OPENAI_API_KEY": "none"}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout


check(ask(PROMPT))
check(ask("--no-stream", PROMPT))
check(json.loads(ask("--schema", json.dumps(SCHEMA), "A cat."))["name"])
