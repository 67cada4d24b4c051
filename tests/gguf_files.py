"""GGUF files of tiny checkpoints, written by gguf-py, with names and tensors converted as by llama.cpp's converter."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests import gguf_hybrids, gguf_parts
from tests.gguf_hybrids import DELTA_NET, MAMBA
from vllm_lite.checkpoint.tensors.headers import weight_files

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPT2LMHeadModel": "gpt2",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Cohere2ForCausalLM": "cohere2",
    "SmolLM3ForCausalLM": "smollm3",
    "Exaone4ForCausalLM": "exaone4",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "BloomForCausalLM": "bloom",
    "GPTNeoXForCausalLM": "gptneox",
    "FalconForCausalLM": "falcon",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Ministral3ForCausalLM": "mistral3",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "Qwen3NextForCausalLM": "qwen3next",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "BertModel": "bert",
    "RobertaModel": "bert",
    "NomicBertModel": "nomic-bert",
}
PERMUTED = ("llama", "mistral3", "granite", "granitemoe", "smollm3", *MAMBA)
HEAD_BY_HEAD = ("bloom", "gptneox", "falcon")
"""Families whose checkpoints store Q, K and V of each KV head together."""
PLUS_ONE = ("gemma", "gemma2", "gemma3", *DELTA_NET)
NUMBERS = {
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "clip_qkv": "attention.clamp_kqv",
    "sliding_window": "attention.sliding_window",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "moe_num_shared_experts": "expert_shared_count",
    "ffn_hidden_size": "feed_forward_length",
}
"""Keys of config.json -> keys of the file, without its architecture."""

KindOf = Callable[[str], str]
"""The type of a matrix, by its name in the file."""


def write_gguf(
    file: Path,
    checkpoint: Path,
    kind_of: KindOf = lambda _: "F32",
    more: dict[str, Any] | None = None,
    *,
    dense: bool = False,
    rows: dict[str, int] | None = None,
    joins: bool = False,
    factors: dict[str, list[float]] | None = None,
) -> Path:
    """Write the checkpoint folder to `file`, and return that. Norms and biases remain float32. `more`: further
    metadata, or another architecture. `dense`: write the blocks' values as float32. `rows`: further tensors, with
    numbers of elements. `joins`: join tensors that converters may join, such as gate and up of experts. `factors`:
    numbers that matrices, or those of each expert, have beside their blocks."""
    config = json.loads((checkpoint / "config.json").read_text())
    config |= config.get("text_config", {})
    more = dict(more or {})
    architecture = more.pop("general.architecture", _architecture(config))
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (_metadata(architecture, config) | more).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_float32(key, value)
    writer.add_token_list(_tokens_of(checkpoint, config["vocab_size"]))
    tensors = tensors_of(checkpoint, architecture, config, joins=joins)
    for gate in [name for name in tensors if joins and "ffn_gate_exps" in name]:
        parts = tensors.pop(gate), tensors.pop(gate.replace("gate", "up"))
        tensors[gate.replace("gate", "gate_up")] = torch.cat(parts, dim=1)
    for name, tensor in tensors.items():
        kind = kind_of(name) if len(tensor.shape) > 1 and "gate_inp" not in name else "F32"
        own = (factors or {}).get(name.removesuffix(".weight"), [1.0])
        add_tensor(writer, name, tensor, kind, dense=dense, factors=own)
        if own != [1.0] and not dense:
            writer.add_tensor(name.replace(".weight", ".scale"), np.array(own, np.float32))
    for name, size in (rows or {}).items():
        add_tensor(writer, name, torch.zeros(size), "F32")
    write(writer)
    return file


def _tokens_of(checkpoint: Path, vocab_size: int) -> list[str]:
    """The tokens of its tokenizer.json, filled up as by llama.cpp's converter."""
    file = checkpoint / "tokenizer.json"
    known: dict[str, int] = json.loads(file.read_text())["model"]["vocab"] if file.is_file() else {}
    names = {number: token for token, number in known.items()}
    return [names.get(number, f"[PAD{number}]") for number in range(vocab_size)]


def _architecture(config: dict[str, Any]) -> str:
    name = ARCHITECTURES[config["architectures"][0]]
    return f"{name}_moe" if name == "nemotron_h" and "moe" in config["layers_block_type"] else name


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    kind: str,
    *,
    dense: bool = False,
    factors: Sequence[float] = (1.0,),
) -> None:
    array, number = tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, array)
    elif dense:
        floats = gguf.quants.dequantize(quantized(array, kind), number)
        each = np.array(factors, np.float32).reshape(-1, *[1] * (floats.ndim - 1))
        writer.add_tensor(name, floats * each)
    else:
        writer.add_tensor(name, quantized(array, kind), raw_dtype=number)


def quantized(array: np.ndarray, kind: str) -> np.ndarray:
    """gguf-py quantizes to the older types; of K-quants and lattices it can read any bytes, so random ones with small
    scales are taken."""
    number = gguf.GGMLQuantizationType[kind]
    halves = {"Q4_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "NVFP4": ()}.get(kind)
    if halves is None:
        return gguf.quants.quantize(array, number)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(array.size).integers(0, 256, (array.size // elements, num_bytes), dtype=np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 4e-4, np.float16).view(np.uint8)
    if kind == "NVFP4":  # scales of a byte
        blocks[:, :4] = 2
    return blocks.reshape(*array.shape[:-1], -1)


def _metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    named = config | rope
    head_size = config.get("head_dim") or named["hidden_size" if "hidden_size" in named else "n_embd"] // (
        named.get("num_attention_heads") or named["n_head"]
    )
    found = {
        f"{architecture}.{theirs}": float(value) if isinstance(value, float) else value
        for ours, theirs in NUMBERS.items()
        if isinstance(value := named.get(ours), int | float) and not isinstance(value, bool)
    }
    if "norm_topk_prob" in config:
        found[f"{architecture}.expert_weights_norm"] = config["norm_topk_prob"]
    if config.get("head_dim"):
        found[f"{architecture}.attention.value_length"] = head_size
    if part := named.get("partial_rotary_factor"):
        found[f"{architecture}.rope.dimension_count"] = int(part * head_size)
    found.setdefault(f"{architecture}.context_length", 2048)
    scaling = _scaling(rope, int(found[f"{architecture}.context_length"]))
    own = OWN.get(architecture, lambda _: {})(config)
    found |= {f"{architecture}.{key}": value for key, value in (scaling | own).items()}
    if architecture == "gpt2":
        found["gpt2.feed_forward_length"] = config.get("n_inner") or 4 * config["n_embd"]
    tokens = {"bos": config.get("bos_token_id"), "eos": config.get("eos_token_id")}
    ids = {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in tokens.items() if isinstance(id_, int)}
    return found | ids


def _falcon(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention.head_count_kv": _kv_heads("falcon", config)}


def _neox(config: dict[str, Any]) -> dict[str, Any]:
    part = (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    size = config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": int(part * size), "use_parallel_residual": config["use_parallel_residual"]}


def _deepseek(config: dict[str, Any]) -> dict[str, Any]:
    rank, rope_size = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope_size,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_size,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope_size,
        "expert_gating_func": 2 if config["architectures"][0] == "DeepseekV3ForCausalLM" else 1,
    }
    magnitude = (config.get("rope_parameters") or {}).get("mscale_all_dim")
    return found | ({"rope.scaling.yarn_log_multiplier": 0.1 * magnitude} if magnitude else {})


def _lfm2(config: dict[str, Any]) -> dict[str, Any]:
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    inner, unit = int(2 * config["intermediate_size"] / 3), config.get("block_multiple_of", 256)
    own = {"feed_forward_length": -(-inner // unit) * unit} if "num_experts" not in config else {}
    return own | {
        "attention.head_count_kv": [each * config["num_key_value_heads"] for each in attends],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _ministral3(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"] or {}
    if "llama_4_scaling_beta" not in rope:
        return {}
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


OWN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "falcon": _falcon,
    "gptneox": _neox,
    "deepseek2": _deepseek,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "mistral3": _ministral3,
    "granitemoe": lambda config: {"expert_shared_feed_forward_length": config.get("shared_intermediate_size", 0)},
    "granitehybrid": gguf_hybrids.granite,
    "nemotron_h": gguf_hybrids.nemotron,
    "nemotron_h_moe": gguf_hybrids.nemotron,
    "qwen35": gguf_hybrids.qwen,
    "qwen35moe": gguf_hybrids.qwen,
    "qwen3next": gguf_hybrids.qwen,
    "gemma4": gguf_parts.gemma4,
}
"""Architecture -> a function that makes its special metadata."""


def _kv_heads(architecture: str, config: dict[str, Any]) -> int:
    heads: int = config.get("num_attention_heads") or config["n_head"]
    if architecture != "falcon":
        return heads
    if config["new_decoder_architecture"]:
        return int(config["num_kv_heads"])
    return 1 if config["multi_query"] else heads


def _scaling(rope: dict[str, Any], max_positions: int) -> dict[str, Any]:
    kind, found = rope.get("rope_type"), dict[str, Any]()
    if kind in ("linear", "yarn"):
        found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = max_positions / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if "original_max_position_embeddings" in rope and kind != "llama3":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _factors(rope: dict[str, Any], architecture: str, head_size: int) -> dict[str, torch.Tensor]:
    """The tensors of ropes with a divisor for each pair."""
    if rope.get("rope_type") == "longrope" and architecture == "phi3":
        return {
            f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)
            for name in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, head_size, 2) / head_size)
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    kept = torch.where(waves < original / high, torch.ones_like(waves), between)
    return {"rope_freqs.weight": torch.where(waves > original / low, torch.full_like(waves, factor), kept)}


def tensors_of(
    checkpoint: Path, architecture: str, config: dict[str, Any], *, joins: bool = False
) -> dict[str, torch.Tensor]:
    """The tensors of the file, by their names in it. `joins`: as in write_gguf."""
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, _num_layers(config))
    rope = config.get("rope_parameters") or {}
    head_size = config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // (
        config.get("num_attention_heads") or config["n_head"]
    )
    stored = _factors(rope, architecture, head_size)
    if architecture == "gemma4":
        stored["rope_freqs.weight"] = gguf_parts.gemma4_factors(config)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for path in weight_files(checkpoint):
        for name, tensor in load_file(path).items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            if name.endswith("block_sparse_moe.input_linear.weight"):
                layer = name.split(".")[2]
                gate, up = tensor.chunk(2, dim=1)
                stored |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
                continue
            if name.endswith("shared_mlp.input_linear.weight"):
                stored |= gguf_hybrids.split(name, tensor, has_experts=bool(config.get("num_local_experts")))
                continue
            if name.endswith("kv_b_proj.weight"):
                stored |= _by_head(names.get_name(name.removesuffix(".kv_b_proj.weight") + ".k_b_proj"), tensor, config)
                continue
            if (parts := None if joins else gguf_parts.of(architecture, name, tensor, config)) is not None:
                stored |= parts
                continue
            named = name.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
            here, index = _without_expert(named)
            here = here.removeprefix("transformer.") if architecture == "bloom" else here
            here = here.replace("model.layers", "layers") if ".feed_forward.experts." in here else here
            here = here.replace("model.language_model.", "model.")
            here = gguf_hybrids.looked_up(here) if architecture in (*MAMBA, *DELTA_NET) else here
            found = names.get_name(here, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ValueError(f"{architecture} has no name for {here}")
            changed = _changed(tensor, found, architecture, config)
            if index is None:
                stored[found] = changed
            else:
                experts.setdefault(found, {})[index] = changed
    return stored | {name: torch.stack([each for _, each in sorted(some.items())]) for name, some in experts.items()}


def _num_layers(config: dict[str, Any]) -> int:
    kinds = config.get("layers_block_type") or ()
    return int(config.get("num_hidden_layers") or len(kinds) or config["n_layer"])


def _by_head(name: str | None, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Split into the matrices that compute K and V from latents, with K's transposed. `name`: tensor name of K's
    matrices."""
    assert name is not None
    sizes = config["qk_nope_head_dim"], config["v_head_dim"]
    keys, values = tensor.view(config["num_attention_heads"], sum(sizes), -1).split(sizes, dim=1)
    value_name = name.replace("attn_k_b", "attn_v_b")
    return {f"{name}.weight": keys.transpose(1, 2).contiguous(), f"{value_name}.weight": values.contiguous()}


def _without_expert(name: str) -> tuple[str, int | None]:
    before, found, after = name.partition(".experts.")
    if not found:
        return name, None
    index, _, part = after.partition(".")
    return f"{before}.experts.{part}", int(index)


def _changed(tensor: torch.Tensor, name: str, architecture: str, config: dict[str, Any]) -> torch.Tensor:
    part = name.split(".")[-2]
    if architecture in (*MAMBA, *DELTA_NET) and (own := name.split(".", 2)[-1]).startswith(
        ("ssm_", "attn_qkv", "attn_gate")
    ):
        return gguf_hybrids.changed(tensor, own, architecture, config)
    if architecture in PERMUTED and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        halves = tensor.view(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if architecture in PLUS_ONE and part.endswith("norm"):
        return tensor + 1
    if architecture == "gpt2" and part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and tensor.dim() == 2:
        return tensor.t()
    if part == "conv":
        return tensor.squeeze(1)
    if part == "ffn_gate_inp_shexp" or (part == "exp_probs_b" and tensor.dim() == 2):
        return tensor[0]
    if architecture in HEAD_BY_HEAD and part == "attn_qkv":
        kv_heads, heads = _kv_heads(architecture, config), config.get("num_attention_heads") or config["n_head"]
        size = (config.get("hidden_size") or config["n_embd"]) // heads
        queries, keys, values = tensor.view(kv_heads, -1, size, *tensor.shape[1:]).split(
            (heads // kv_heads, 1, 1), dim=1
        )
        return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (queries, keys, values)])
    return tensor
