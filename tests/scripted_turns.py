"""A checkpoint that plays an agent's model: it answers each request with the script that its chat template chooses.

A prompt of an agent has any length, so the model's next token depends on its last token alone: each state of a script
has a one-hot token vector, attention and MLP add nothing, and row b of the head has the vector of a where b follows a.
The template ends the prompt with the special token of a script, whose pieces are tokens of the vocabulary to which no
merge leads, so that no text of a prompt has them.
"""

import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
VOCAB_SIZE = 6000
"""Tokens of the vocabulary other than those of the scripts: prompts of 100,000 characters become 30,000 tokens."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
NUM_PIECES = 6
"""Minimum tokens of a script, so that calls and texts arrive in several deltas."""
MAX_TOKENS = 1 << 18
"""Context of the model. No vector depends on the position, and a block has few bytes."""
_SHARPNESS = 30.0
_HEAD_SIZE = 16


def make_scripted(path: Path, scripts: Mapping[str, str], choice: str) -> Path:
    """Write the checkpoint to the folder `path` and return it.

    `choice` is a Jinja template that renders the name of one of `scripts`, given `messages` and `tools`.
    """
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    chains = _chains(tokenizer, scripts)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    num_tokens = len(tokenizer["model"]["vocab"]) + len(scripts)
    states = list(dict.fromkeys(token for chain in chains for token in chain[:-1]))
    width = _HEAD_SIZE * -(-len(states) // _HEAD_SIZE)
    vectors, head = torch.zeros(num_tokens, width), torch.zeros(num_tokens, width)
    for place, token in enumerate(states):
        vectors[token, place] = 1.0
    for chain in chains:
        for before, after in pairwise(chain):
            head[after, states.index(before)] = _SHARPNESS
    config = _config(num_tokens, width)
    (path / "config.json").write_text(json.dumps(config))
    save_file(_tensors(vectors, head, width), path / "model.safetensors")
    settings = {"chat_template": _template(choice), "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _tokenizer() -> dict[str, Any]:
    """A byte-level vocabulary whose merges are trained on this project's documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([page.read_text() for page in sorted(DOCS.glob("*.md"))], trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def _chains(tokenizer: dict[str, Any], scripts: Mapping[str, str]) -> list[list[int]]:
    """Add the pieces of the scripts to the vocabulary, and return the tokens of each script, its special token first
    and the model's end last."""
    vocab = tokenizer["model"]["vocab"]
    known = set(vocab)
    chains = [_pieces(text, known) for text in scripts.values()]
    for chain in chains:
        vocab.update({word: len(vocab) + place for place, word in enumerate(chain)})
    end = vocab[END]
    found = list[list[int]]()
    for name, chain in zip(scripts, chains, strict=True):
        start = len(vocab) + len(found)
        tokenizer["added_tokens"].append(_special(start, mark_of(name)))
        found.append([start, *(vocab[word] for word in chain), end])
    return found


def _pieces(text: str, known: set[str]) -> list[str]:
    """Cut a script into words that are not `known`, and add them to `known`, so that no two states are the same
    token."""
    size = max(4, -(-len(text) // NUM_PIECES))
    pieces, start = list[str](), 0
    while start < len(text):
        end = start + size
        while (word := _word(text[start:end])) in known and end < len(text):
            end += 1
        if word in known:  # the rest of the text goes to the piece before it
            known.remove(pieces[-1])
            word = pieces.pop() + word
        known.add(word)
        pieces.append(word)
        start = end
    return pieces


def _word(text: str) -> str:
    """The spelling of `text` in a byte-level vocabulary."""
    return "".join(_letters()[byte] for byte in text.encode())


@cache
def _letters() -> dict[int, str]:
    """The character of each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + place) for place, byte in enumerate(others)}}


def mark_of(name: str) -> str:
    return f"<|play {name}|>"


def _special(number: int, content: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **plain, "special": True}


def _config(num_tokens: int, width: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": num_tokens,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def _tensors(vectors: Any, head: Any, width: int) -> dict[str, Any]:
    """The model's tensors: all zero except for token vectors, the head and norms."""
    import torch

    layer = "model.layers.0."
    shapes = {f"self_attn.{name}_proj": (_HEAD_SIZE, width) for name in "qkv"}
    shapes |= {"self_attn.o_proj": (width, _HEAD_SIZE), "mlp.down_proj": (width, 16)}
    shapes |= {"mlp.gate_proj": (16, width), "mlp.up_proj": (16, width)}
    norms = ("model.norm", layer + "input_layernorm", layer + "post_attention_layernorm")
    return {
        "model.embed_tokens.weight": vectors,
        "lm_head.weight": head,
        **{f"{layer}{name}.weight": torch.zeros(shape) for name, shape in shapes.items()},
        **{f"{name}.weight": torch.ones(width) for name in norms},
    }


def _template(choice: str) -> str:
    """Messages and tools as Qwen's templates write them, and the special token of a script."""
    return (
        "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>"
        '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
        "{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ message.content }}{%- for call in message.tool_calls or [] %}"
        "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n"
        "{%- set script %}" + choice + "{% endset %}{{ '<|play ' ~ script | trim ~ '|>' }}{% endif %}"
    )
