"""hub_id(): resolves names of models as people type them: hub ids with the hub's URL, and names of Ollama's library.

Files in Ollama's library cannot be read here. Its names are refused with the hub id of the same model.
"""

import re

from vllm_lite.errors import ModelError

SAME_MODELS = {
    "all-minilm": "sentence-transformers/all-MiniLM-L6-v2",
    "deepseek-r1": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M",
    "gemma3": "bartowski/google_gemma-3-4b-it-GGUF:Q4_K_M",
    "gemma3:270m": "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
    "gemma3:1b": "bartowski/google_gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:12b": "bartowski/google_gemma-3-12b-it-GGUF:Q4_K_M",
    "gpt-oss": "openai/gpt-oss-20b",
    "gpt-oss:120b": "openai/gpt-oss-120b",
    "llama3": "bartowski/Meta-Llama-3-8B-Instruct-GGUF:Q4_K_M",
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "llama3.2": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama3.3": "bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M",
    "mistral": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "phi4": "bartowski/phi-4-GGUF:Q4_K_M",
    "qwen2.5": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder": "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "qwen3": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "smollm2": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2:135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tinyllama": "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
}
"""Names of Ollama's library -> hub ids. A name without a tag means the library's default size."""
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_LIBRARY = re.compile(r"(?:https?://)?(?:registry\.)?ollama\.(?:ai|com)/(?:library/)?|library/")
_REST = re.compile(r"/(?:tree|blob|resolve)/.*$")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(?::[\w.-]+)?")


def hub_id(name: str) -> str:
    """Return the hub id in `name`, without the hub's URL and the path of a page. Raises ModelError for a name of
    Ollama's library, with the hub id to use."""
    own = _REST.sub("", _ADDRESS.sub("", name, count=1)).rstrip("/")
    of_library = _LIBRARY.sub("", own, count=1)
    if "/" in of_library or (of_library == own and not _NAME.fullmatch(own)):
        return own
    known = _same_model(of_library)
    use = (
        f"use {known}"
        if known
        else "look for ORG/REPO, or ORG/REPO:LABEL of a GGUF file, at https://huggingface.co/models"
    )
    raise ModelError(f"{name!r} is a name of Ollama's library, and models come from the hub here: {use}")


def _same_model(name: str) -> str | None:
    base, _, tag = name.partition(":")
    sized = SAME_MODELS.get(f"{base}:{tag.partition('-')[0]}")
    return sized or (SAME_MODELS.get(base) if tag.partition("-")[0] in ("", "latest") else None)
