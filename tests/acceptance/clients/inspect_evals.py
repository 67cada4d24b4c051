"""inspect-ai: a task of two samples over the OpenAI-compatible and the vLLM provider."""

import os
import tempfile

from common import URL, check
from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ |= {"TRY_BASE_URL": f"{URL}/v1", "TRY_API_KEY": "none", "VLLM_BASE_URL": f"{URL}/v1", "VLLM_API_KEY": "none"}
task = Task(
    dataset=[Sample("A story.", target="a"), Sample("A cat.", target="a")], solver=generate(), scorer=includes()
)
with tempfile.TemporaryDirectory() as folder:
    for model in ("openai-api/try/demo", "vllm/demo"):
        (log,) = evaluate(task, model=model, max_tokens=16, display="none", log_dir=folder)
        check(log.status == "success")
