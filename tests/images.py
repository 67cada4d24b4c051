"""Tiny random checkpoints that see images, and images for them."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import write_checkpoint

Colors = NDArray[np.uint8]
"""[height, width, 3]"""
IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
TILE, PATCH, MERGE = 32, 8, 2
SPECIAL = [
    AROUND,
    IMAGE,
    GLOBAL,
    "<end_of_utterance>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
]
IMAGE_TOKEN = 385
VOCAB = 384 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""A template like SmolVLM's, which reads the types of parts."""


COLORS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
SIGHT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"initializer_range": 0.3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LONG = {"max_position_embeddings": 4096, "pad_token_id": 0}
"""Fields of several families' vision configs, and of their text configs."""


def write_model(
    path: Path,
    family: str,
    config: dict[str, Any],
    special: list[str],
    template: str,
    processor: dict[str, Any],
    file: str = "preprocessor_config.json",
) -> Path:
    """Write a random checkpoint of this family of transformers. `special`: tokens after the usual ones; `processor`:
    contents of `file`."""
    import transformers

    kind, model = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForConditionalGeneration")
    write_checkpoint(path, kind, model, config)
    _add_tokens(path, special)
    (path / file).write_text(json.dumps(processor))
    (path / "chat_template.jinja").write_text(template)
    return path


def make_smolvlm(path: Path, family: str = "SmolVLM", **settings: Any) -> Path:
    """Write a random SmolVLM (or Idefics3) with tiles of 32 x 32 pixels, of 4 tokens each."""
    vision = SIGHT | WIDE | {"image_size": TILE, "patch_size": PATCH}
    text = {"model_type": "llama", "vocab_size": VOCAB, "head_dim": 16} | HEADS | LONG
    own = {"text_config": text, "vision_config": vision, "scale_factor": MERGE, "image_token_id": IMAGE_TOKEN}
    processor = {
        "image_processor_type": f"{family}ImageProcessor",
        "processor_class": f"{family}Processor",
        "do_image_splitting": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "max_image_size": {"longest_edge": TILE},
        "size": {"longest_edge": 2 * TILE},
        "resample": 1,
        "rescale_factor": 1 / 255,
    }
    write_model(path, family, own | {"tie_word_embeddings": False} | settings, SPECIAL, TEMPLATE, processor)
    (path / "processor_config.json").write_text(
        json.dumps({"image_seq_len": 4, "processor_class": f"{family}Processor"})
    )
    return path


QWEN_SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A shorter template like Qwen3.5's."""


QWEN_VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "depth": 2},
    "Qwen2_5_VL": {"window_size": 4 * PATCH, "fullatt_block_indexes": [1], "depth": 3},
    "Qwen3VL": {"num_position_embeddings": 25, "depth": 3, "deepstack_visual_indexes": [0, 2]},
    "Qwen3VLMoe": {"num_position_embeddings": 25, "depth": 3, "deepstack_visual_indexes": [1, 2]},
    "Qwen3_5": {"num_position_embeddings": 25, "depth": 2},
}
"""The fields of each family's vision config that the others lack."""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN_TEXT: dict[str, dict[str, Any]] = {
    "Qwen2VL": HEADS,
    "Qwen2_5_VL": HEADS,
    "Qwen3VL": HEADS | {"head_dim": 16, "num_hidden_layers": 4},
    "Qwen3VLMoe": HEADS | {"head_dim": 16, "num_hidden_layers": 3} | _EXPERTS,
}
"""The sizes of the text models, but for hybrids."""


def make_qwen(path: Path, family: str = "Qwen3_5", **text: Any) -> Path:
    """Write a random model with its tower: patches of 8 x 8 pixels, of which 2 x 2 are a token. Qwen3.5 is a hybrid."""
    from tests.families.hybrid import RECURRENT

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if not family.startswith("Qwen2"):
        rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    if family.startswith("Qwen3_5"):
        rope["partial_rotary_factor"] = 0.5
    own: dict[str, Any] = {"vocab_size": 384 + len(QWEN_SPECIAL), "rope_parameters": rope} | LONG
    vision = {"num_heads": 4, "patch_size": PATCH} | WIDE | QWEN_VISION[family]
    if family != "Qwen2VL":
        vision |= {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64}
    first = 384
    ids = {"vision_start_token_id": first, "vision_end_token_id": first + 1}
    ids |= {"image_token_id": first + 2, "video_token_id": first + 3}
    sizes = QWEN_TEXT.get(family, RECURRENT)
    processor: dict[str, Any] = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "do_resize": True}
    processor |= {"size": {"shortest_edge": 256, "longest_edge": 64 * 64}, "resample": 3} | COLORS
    config = {"text_config": sizes | own | text, "vision_config": vision, **ids}
    return write_model(path, family, config, QWEN_SPECIAL, QWEN_TEMPLATE, processor)


MISTRAL_SPECIAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}[IMG]"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{{ message.content }}</s>{% endif %}"
    "{% endfor %}"
)
"""A shorter template like Mistral Small's."""


def make_mistral3(path: Path, **settings: Any) -> Path:
    """Write a random Mistral 3: patches of 8 x 8 pixels, of which 2 x 2 are a vector."""
    own = {"spatial_merge_size": 2, "image_token_index": 384, "projector_hidden_act": "gelu"}
    return _write_pixtral(path, "Mistral3", own, {"spatial_merge_size": 2}, **settings)


def make_pixtral(path: Path, **settings: Any) -> Path:
    """Write a random Pixtral, as a LLaVA: patches of 8 x 8 pixels, each a vector."""
    own = {"image_token_index": 384, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _write_pixtral(path, "Llava", own, {}, **settings)


def _write_pixtral(path: Path, family: str, own: dict[str, Any], outer: dict[str, Any], **settings: Any) -> Path:
    text = {"model_type": "mistral", "vocab_size": 384 + len(MISTRAL_SPECIAL), "head_dim": 16} | HEADS
    text |= {"max_position_embeddings": 4096, "sliding_window": None}
    vision = SIGHT | WIDE | {"model_type": "pixtral", "image_size": 64, "patch_size": PATCH}
    vision |= {"hidden_act": "silu", "head_dim": 12}
    config = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False} | own | settings
    processor = {"size": {"longest_edge": 64}, "patch_size": PATCH, "resample": 3, "do_resize": True, **CLIP}
    write_model(path, family, config, MISTRAL_SPECIAL, MISTRAL_TEMPLATE, processor)
    (path / "processor_config.json").write_text(json.dumps({"patch_size": PATCH, "image_token": "[IMG]", **outer}))
    return path


ONEVISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% endif %}{% endfor %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""A shorter template like LLaVA-OneVision's: images precede the text."""
ONEVISION_SPECIAL = ["<image>", "<video>", "<|im_start|>", "<|im_end|>"]
SQUARE = 28
PINPOINTS = [[height * SQUARE, width * SQUARE] for height in (1, 2, 3) for width in (1, 2, 3)]


def make_onevision(path: Path, **settings: Any) -> Path:
    """Write a random LLaVA-OneVision: squares of 28 x 28 pixels, in patches of 9 x 9; one pixel is not seen."""
    text = {"model_type": "qwen2", "vocab_size": 384 + len(ONEVISION_SPECIAL)} | HEADS | LONG
    vision = SIGHT | WIDE | {"model_type": "siglip_vision_model", "image_size": SQUARE, "patch_size": 9}
    own = {"text_config": text, "vision_config": vision | {"vision_use_head": False}, "image_token_index": 384}
    own |= {"video_token_index": 385, "image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_3"}
    processor = {"size": {"height": SQUARE, "width": SQUARE}, "image_grid_pinpoints": PINPOINTS, "resample": 3, **CLIP}
    return write_model(path, "LlavaOnevision", own | settings, ONEVISION_SPECIAL, ONEVISION_TEMPLATE, processor)


def make_llava(path: Path, family: str = "Llava", **settings: Any) -> Path:
    """Write a random LLaVA or LlavaNext: squares of 28 x 28 pixels, in patches of 9 x 9."""
    text = {"model_type": "llama", "vocab_size": 384 + len(ONEVISION_SPECIAL), "head_dim": 16} | HEADS | LONG
    vision = SIGHT | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": SQUARE, "patch_size": 9}
    own: dict[str, Any] = {"text_config": text, "vision_config": vision | {"projection_dim": 48}}
    processor: dict[str, Any] = {
        "size": {"shortest_edge": SQUARE},
        "crop_size": {"height": SQUARE, "width": SQUARE},
        **CLIP,
    }
    processor |= {"resample": 3, "do_center_crop": True}
    if family == "LlavaNext":
        own["image_grid_pinpoints"] = processor["image_grid_pinpoints"] = PINPOINTS
    config = own | {"image_token_index": 384} | settings
    return write_model(path, family, config, ONEVISION_SPECIAL, ONEVISION_TEMPLATE, processor)


GEMMA_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER"
    "{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
"""A shorter template like Gemma's."""
GEMMA_TEXT: dict[str, Any] = {
    **HEADS,
    **LONG,
    "vocab_size": 387,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 11,
    "initializer_range": 0.2,
}
"""An image has more tokens than the window."""
GEMMA_IDS = {"boi": 384, "image": 385, "eoi": 386}


def make_gemma3(path: Path, **settings: Any) -> Path:
    """Write a random Gemma 3 whose images have 32 x 32 pixels, and 16 tokens."""
    vision = SIGHT | WIDE | {"image_size": TILE, "patch_size": 4, "vision_use_head": False}
    ids = {f"{name}_token_index": number for name, number in GEMMA_IDS.items()}
    own = {"text_config": GEMMA_TEXT | {"query_pre_attn_scalar": 16}, "vision_config": vision, **ids}
    own |= {"mm_tokens_per_image": 16, "tie_word_embeddings": True}
    processor: dict[str, Any] = {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
    processor |= {"size": {"height": TILE, "width": TILE}, "resample": 2, "do_resize": True, "do_pan_and_scan": None}
    special = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    template = GEMMA_TEMPLATE.replace("PLACEHOLDER", special[0])
    write_model(path, "Gemma3", own | settings, special, template, processor | COLORS)
    return _name_gemma_tokens(path, special)


def make_unified(path: Path, **text: Any) -> Path:
    """Write a random Gemma 4 Unified, in which 12 x 12 pixels are a token, and an image has at most 70."""
    vision = {"patch_size": 4, "mm_embed_dim": 40, "mm_posemb_size": 70, "output_proj_dims": 40}
    return _write_gemma4(path, "Gemma4Unified", vision, {"global_head_dim": 32} | text)


def make_gemma4(path: Path, vision: dict[str, Any] | None = None, **text: Any) -> Path:
    """Write a random Gemma 4, in which 3 x 3 patches of 4 x 4 pixels are a token, and an image has at most 70."""
    sight = SIGHT | {"num_key_value_heads": 4, "head_dim": 12, "patch_size": 4, "position_embedding_size": 210}
    usual = {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    return _write_gemma4(path, "Gemma4", sight | {"initializer_range": 0.2} | (vision or {}), usual | text)


def _write_gemma4(path: Path, family: str, vision: dict[str, Any], text: dict[str, Any]) -> Path:
    own = {"vision_config": vision, "text_config": GEMMA_TEXT | text, "video_token_id": 400, "audio_token_id": 401}
    own |= {f"{name}_token_id": number for name, number in GEMMA_IDS.items()}
    own |= {"audio_config": None, "tie_word_embeddings": True}
    processor: dict[str, Any] = {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3, "resample": 3}
    processor |= {"do_resize": True, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    special, outer = ["<|image>", "<|image|>", "<image|>"], {"image_processor": processor}
    template = GEMMA_TEMPLATE.replace("PLACEHOLDER", special[1])
    write_model(path, family, own, special, template, outer, "processor_config.json")
    return _name_gemma_tokens(path, special)


def _name_gemma_tokens(path: Path, special: list[str]) -> Path:
    file = path / "tokenizer_config.json"
    names = dict(zip(("boi_token", "image_token", "eoi_token"), special, strict=True))
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    return path


def _add_tokens(path: Path, special: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer

    file = path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(file))


def picture(width: int, height: int, seed: int = 0) -> Colors:
    """uint8 [height, width, 3]: random colors in large blots, so that resizing does not level them."""
    from PIL import Image

    few = np.random.default_rng([seed, width, height]).integers(0, 256, (4, 5, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC))


def as_file(kind: str, mode: str, width: int, height: int, seed: int) -> bytes:
    """A file with random pixels."""
    from PIL import Image

    colors = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    made = BytesIO()
    if mode == "I;16":
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 2**16, (height, width), dtype=np.uint16))
    else:
        image = Image.fromarray(colors, "RGBA")
        image = image.convert("RGB").convert(mode) if mode in ("CMYK", "L", "1", "P") else image.convert(mode)
    image.save(made, kind)
    return made.getvalue()


def chat_of(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """A user's message of texts and images in their order, as LLM.chat takes it."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def chats() -> list[list[Any]]:
    """Parts of users' messages: images of several sizes before, between and behind texts, none, and the same twice."""
    from PIL import Image

    shown = [Image.fromarray(picture(*each)) for each in ((90, 60, 1), (20, 30, 2), (120, 17, 3), (64, 64, 4))]
    return [
        [shown[0], "a page"],
        ["one", shown[1], "two", shown[2], "three"],
        ["no image at all, only words"],
        [shown[3], "and once more", shown[3]],
    ]
