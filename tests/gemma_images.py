"""Answers of transformers to prompts with images for Gemma's models, and checks for each family."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.images import chat_of, chats
from vllm_lite import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "single_process": True, "seed": 0, "block_size": 8}
KINDS = [("PNG", mode) for mode in ("RGB", "RGBA", "P", "L", "LA", "1", "I;16")]
KINDS += [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")]
CHATS = chats()
CHATS.append([CHATS[0][0], "a page, then, of another book, and what is written there in the end"])


@dataclass
class Truth:
    """Results of transformers for a prompt: its tokens, the log-probability of each except the first, and the
    answer."""

    ids: list[int]
    logprobs: torch.Tensor
    answer: list[int]

    @classmethod
    def of(cls, model: Any, inputs: dict[str, torch.Tensor], *, by_masks: bool = False) -> "Truth":
        """`inputs`: the processor's, for one prompt. `by_masks`: token by token, with transformers' masks for a cache
        of fixed size. With its other masks, Gemma 4 Unified lets the tokens of an image attend to each other in all
        layers, against its own configuration, and beyond the window."""
        ids = inputs["input_ids"]
        with torch.inference_mode():
            logits = model(**inputs | {"attention_mask": masks_of(model, inputs)}).logits[0]
            if by_masks:
                made = greedy(model, inputs)
            else:
                settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
                made = model.generate(**inputs, **settings)[0, ids.shape[1] :].tolist()
        logprobs = logits.float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        return cls(ids[0].tolist(), logprobs, made)


def greedy(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    given, made = dict(inputs), list[int]()
    for _ in range(24):
        logits = model(**given | {"attention_mask": masks_of(model, given)}).logits[0, -1]
        made.append(int(logits.argmax()))
        for name, value in (("input_ids", made[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)):
            given[name] = torch.nn.functional.pad(given[name], (0, 1), value=value)
    return made


def masks_of(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """The masks that `generate` makes for the prompt."""
    kinds = {name: inputs[name] for name in ("token_type_ids", "mm_token_type_ids") if name in inputs}
    length = inputs["input_ids"].shape[1]
    return model.create_masks_for_generate(
        model.config,
        torch.zeros(1, length, model.config.text_config.hidden_size),
        inputs["attention_mask"],
        None,
        torch.arange(length)[None],
        **kinds,
    )


def check_answers(checkpoint: Path, truths: Sequence[Truth], settings: dict[str, Any]) -> None:
    """Check that tokens equal those of transformers: alone, batched, in chunks, after preemption, and from the
    cache."""
    preempts = "preemption_mode" in settings
    times = 3 if preempts else 1
    settings = {"num_gpu_blocks_override": 128, **SMALL, **({"kv_watermark": 0.0} if preempts else {}), **settings}
    with LLM(str(checkpoint), **settings) as llm:
        for turn in range(2 - preempts):
            outputs = llm.chat([chat_of(parts) for parts in CHATS * times], GREEDY, use_tqdm=False)
            for output, truth in zip(outputs, [*truths] * times, strict=True):
                assert output.prompt_token_ids == truth.ids
                assert output.outputs[0].token_ids == truth.answer, f"turn {turn}"
        if preempts:
            assert llm.stats().preemptions > 0


def check_logprobs(checkpoint: Path, truths: Sequence[Truth], settings: dict[str, Any]) -> None:
    """Check the log-probability of every prompt token, including those of images, against transformers, to 1e-4."""
    asked = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    with LLM(str(checkpoint), **{"num_gpu_blocks_override": 128, **SMALL, **settings}) as llm:
        for output, truth in zip(
            llm.chat([chat_of(parts) for parts in CHATS], asked, use_tqdm=False), truths, strict=True
        ):
            assert output.prompt_logprobs is not None
            rows = [row for row in output.prompt_logprobs if row is not None]
            mine = torch.tensor([row[token].logprob for row, token in zip(rows, truth.ids[1:], strict=True)])
            assert torch.allclose(mine, truth.logprobs, atol=1e-4), (mine - truth.logprobs).abs().max()
