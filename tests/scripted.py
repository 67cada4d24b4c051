"""Checkpoints with any wanted output: their next token depends on its position only.

The model is a GPT-2 of one layer whose token vectors are zero and whose attention adds nothing. Its MLP is a table:
unit p fires at position p alone, and adds the code of the token that stands there in a script. So a prompt chooses what
is written behind it by its length, and the chat template makes it as long as the script that a chat asks for wants it:
the one that a user message names ("script 3") plus the number of tool results behind that message.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

Part = str | bytes
SIZE = 128
"""Hidden size. The product of two codes of so many signs is at most about 64, and 128 of a code with itself: the margin
is so wide that neither a lower precision nor a temperature of 1 matters."""
FILL, END = "<|filling|>", "<|scripted|>"
MAX_SCRIPTED = 8192
TEMPLATE = """{%- set found = namespace(number=0) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{%- set found.number = found.number + 1 -%}
{%- elif message.role == 'user' and message.content is string and message.content.startswith('script ') -%}
{%- set found.number = message.content[7:] | int -%}
{%- endif -%}
{%- endfor -%}
{%- set prompts = PROMPTS -%}
{%- set prompt = prompts[[found.number, prompts | length - 1] | min] -%}
{{- '<|filling|>' * prompt[0] }}{{ prompt[1] -}}"""


@dataclass(frozen=True)
class Script:
    """One output. Each of `parts` is one token; text has one token for each character and each added token. `begun` are
    added tokens of the answer that are at the end of the prompt."""

    parts: str | Sequence[Part]
    begun: str = ""


def write_scripted(
    path: str | Path, scripts: Sequence[Script | str], tokens: Sequence[str] = (), *, max_model_len: int = 0
) -> Path:
    """Write a checkpoint that answers these scripts to the folder `path`, and return it. `tokens` are added tokens of
    its vocabulary, those of the scripts' format; all other parts of scripts are in its byte-level vocabulary. Its
    context has at least `max_model_len` tokens, for clients that ask for many; all scripts together may have
    MAX_SCRIPTED tokens."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    all_scripts = [each if isinstance(each, Script) else Script(each) for each in scripts]
    cut = [_cut(each.parts, tokens) for each in all_scripts]
    library, ids = tokenizer_of([part for parts in cut for part in parts], tokens)
    library.save(str(path / "tokenizer.json"))
    table, prompts = dict[int, int](), list[list[int | str]]()
    start = 1 + max((len(_cut(each.begun, tokens)) for each in all_scripts), default=0)
    for script, parts in zip(all_scripts, cut, strict=True):
        prompts.append([start - len(_cut(script.begun, tokens)), script.begun])
        for place, part in enumerate([*parts, END]):
            table[start - 1 + place] = ids[part]  # the model writes this token after position p
        start += len(parts) + 1
    num_rows, num_tokens = -(-start // 64) * 64, max(ids.values()) + 1
    num_positions = max(num_rows, max_model_len)
    assert num_rows <= MAX_SCRIPTED, f"the scripts have {start} tokens"
    _write_model(path, [table.get(place, ids[END]) for place in range(num_rows)], num_positions, num_tokens)
    template = TEMPLATE.replace("PROMPTS", json.dumps(prompts))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": END, "bos_token": FILL})
    )
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "relu",
        "n_embd": SIZE,
        "n_head": 4,
        "n_layer": 1,
        "n_inner": num_rows,
        "n_positions": num_positions,
        "vocab_size": num_tokens,
        "tie_word_embeddings": False,
        "bos_token_id": ids[FILL],
        "eos_token_id": ids[END],
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def _cut(parts: str | Sequence[Part], tokens: Sequence[str]) -> Sequence[Part]:
    if not isinstance(parts, str):
        return parts
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.findall("|".join([*map(re.escape, longest_first), "."]), parts, re.DOTALL)


def tokenizer_of(
    parts: Sequence[Part], tokens: Sequence[str], *, special: bool = False
) -> tuple["Tokenizer", Mapping[Part, int]]:
    """Make a byte-level tokenizer that has each of `parts` as one token. Returns it, and the ids of parts and tokens.

    `special`: the added `tokens` are special ones, which no text shows.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's alphabet: printable bytes are themselves, the others are the letters from 256 on.
    printable = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letter for letter in letters if ord(letter) >= 256)
    alphabet = {byte: printable[byte] if byte in printable else next(others) for byte in range(256)}
    ordinary = dict.fromkeys(part for part in parts if part not in tokens)
    spelled = {it: "".join(alphabet[b] for b in (it.encode() if isinstance(it, str) else it)) for it in ordinary}
    vocabulary = {text: place for place, text in enumerate(dict.fromkeys([*letters, *spelled.values()]))}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([FILL, END])
    library.add_tokens([AddedToken(text, normalized=False, special=special) for text in tokens])
    ids: dict[Part, int] = {part: vocabulary[text] for part, text in spelled.items()}
    known = library.get_vocab()
    return library, ids | {text: known[text] for text in (FILL, END, *tokens)}


def _write_model(path: Path, table: Sequence[int], num_positions: int, num_tokens: int) -> None:
    """Write the weights of a model that outputs `table[p]` at position p, and any token after the end of the table."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    signs = torch.tensor([1.0, -1.0]).repeat(SIZE // 2)  # mean 0 and variance 1: layer norm leaves a code as it is

    def codes(count: int) -> torch.Tensor:
        return torch.stack([signs[torch.randperm(SIZE, generator=generator)] for _ in range(count)])

    places, words, count = codes(len(table)), codes(num_tokens), len(table)
    layer = {f"{norm}.{name}": value for norm in ("ln_1", "ln_2") for name, value in _norm().items()}
    layer |= {
        "attn.c_attn.weight": torch.zeros(SIZE, 3 * SIZE),
        "attn.c_attn.bias": torch.zeros(3 * SIZE),
        "attn.c_proj.weight": torch.zeros(SIZE, SIZE),
        "attn.c_proj.bias": torch.zeros(SIZE),
        "mlp.c_fc.weight": places.T.contiguous(),  # 128 for its own position, at most about 64 for another
        "mlp.c_fc.bias": torch.full((count,), -96.0),
        "mlp.c_proj.weight": words[torch.tensor(table)],
        "mlp.c_proj.bias": torch.zeros(SIZE),
    }
    positions = torch.cat([places, torch.zeros(num_positions - count, SIZE)])
    tensors = {"wte.weight": torch.zeros(num_tokens, SIZE), "wpe.weight": positions, "lm_head.weight": words}
    tensors |= {f"ln_f.{name}": value for name, value in _norm().items()}
    tensors |= {f"h.0.{name}": value for name, value in layer.items()}
    named = {name if name == "lm_head.weight" else f"transformer.{name}": value for name, value in tensors.items()}
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})


def _norm() -> "dict[str, torch.Tensor]":
    import torch

    return {"weight": torch.ones(SIZE), "bias": torch.zeros(SIZE)}
