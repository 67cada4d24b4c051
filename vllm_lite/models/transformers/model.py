"""A model run by transformers' code. Read `TransformersModel.forward`; `_replace` exchanges its modules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_lite.attention.backend import AttentionBackend
from vllm_lite.attention.step_batch import StepBatch
from vllm_lite.checkpoint.shard import Split
from vllm_lite.checkpoint.tensors.headers import read_headers
from vllm_lite.checkpoint.tensors.kv_scales import KVScales
from vllm_lite.checkpoint.tensors.tensor_names import is_ignored
from vllm_lite.checkpoint.tensors.tied_head import has_own_head
from vllm_lite.errors import ModelError
from vllm_lite.kernels.select import ops_for
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.pooler import Pooler
from vllm_lite.layers.vision.tower import VisionTower
from vllm_lite.layers.weights.adapted_head import Which
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightStack, whole_slot
from vllm_lite.models.transformers.attention import LayerStep, PagedAttention, Seen, install, register
from vllm_lite.models.transformers.dry_run import observe, observe_head
from vllm_lite.models.transformers.library import make_skeleton
from vllm_lite.models.transformers.mlps import fuse_mlp
from vllm_lite.models.transformers.modules import ConvModule, EmbeddingModule, HeadModule, LinearModule, become, settle
from vllm_lite.models.transformers.names import Names
from vllm_lite.models.transformers.norms import replace_norms
from vllm_lite.models.transformers.plan import TensorPlan


class TransformersModel:
    """One rank's part of a model of transformers, see `registry.Model`. It always runs eagerly."""

    def __init__(self, parts: Parts, max_model_len: int, max_num_tokens: int) -> None:  # noqa: ARG002 (as all models)
        self.spec = spec = parts.spec
        self.communicator = parts.communicator
        self.parts = parts
        held = [Split.vocabulary(spec.vocab_size, shard) for shard in parts.shard.all_ranks]
        own = held[parts.shard.rank]
        self.own_columns = slice(own.start, own.end)
        self._widths = tuple(part.size for part in held)
        register()
        self.causal = make_skeleton(spec.folder, parts.dtype, max_model_len)
        tied = bool(self.causal.config.tie_word_embeddings) and not has_own_head(Path(spec.folder))
        self.embedding = parts.embedding(own)
        self.lm_head = parts.lm_head(self.embedding, tied=tied)
        stored = read_headers(Path(spec.folder)) if _has_weights(spec.folder) else {}
        self.pooler = None if spec.pooling is None else Pooler(parts)
        self.tower: VisionTower[Any] | None = None
        self._names = Names(self.causal, self.causal.state_dict().keys(), stored)
        self._groups: list[WeightGroup] = []
        self._ops = ops_for(parts.device)
        self._replace()
        self.paged = PagedAttention(spec)
        install(self.causal, self.paged)
        replace_norms(self.causal, self._ops, parts.dtype)
        self.seen: list[Seen] = observe(self.causal, self.paged, spec.per_rank(parts.shard))
        self.body, self._head = self.causal.base_model, self.causal.get_output_embeddings()
        setattr(self.causal, self.causal.base_model_prefix, _Given())
        observe_head(self.causal, spec.hidden_size, own.size)
        settle(self.causal, parts.device)
        settle(self.body, parts.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,  # prepared by `backend`
        kv_caches: list[torch.Tensor],  # per layer: [num_blocks, 2, num_kv_heads, block_size, head_size]
        backend: AttentionBackend,
        progress: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the wanted tokens' hidden states after the final norm: [num_wanted, hidden_size]. To
        transformers, the tokens of all sequences are one sequence with positions; the backend keeps sequences apart."""
        self.paged.step = LayerStep(batch, kv_caches, backend, progress)
        try:
            output = self.body(input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False)
        finally:
            self.paged.step = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden if batch.wanted is None else hidden[batch.wanted]

    def empty_logits(self, num_rows: int) -> torch.Tensor:
        """See Decoder.empty_logits."""
        return self.communicator.shared_rows(num_rows, self.spec.vocab_size, torch.float32)

    @torch.inference_mode()
    def logits(
        self,
        hidden: torch.Tensor,
        out: torch.Tensor | None = None,
        which: Which | None = None,  # noqa: ARG002 - no row has an adapter
    ) -> torch.Tensor:
        """See Decoder.logits. The causal model's code computes them, with `hidden` as the output of its body."""
        if out is None:
            out = self.empty_logits(hidden.shape[0])
        if hidden.shape[0] == 0:
            return out
        self._head.out = out
        result = self.causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._head.out = None
        own = out[:, self.own_columns]
        if result.data_ptr() != own.data_ptr():
            own.copy_(result)
        return out

    @torch.inference_mode()
    def gather_logits(self, out: torch.Tensor) -> None:
        """See Decoder.gather_logits."""
        self.communicator.gather_columns(out, self._widths)

    def weight_groups(self) -> Iterator[WeightGroup]:
        """All tensors that a checkpoint must have, in groups that are loaded one after another."""
        if not self.lm_head.tied:
            yield self.embedding.group(self._embedding_name)
        yield from self._groups
        yield self.lm_head.group(self._embedding_name if self.lm_head.tied else self._head_name)

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name that the model does not need."""
        return is_ignored(name, tied=self.lm_head.tied) or self._names.ignores(name)

    def take_kv_scales(self, scales: Sequence[KVScales]) -> None:
        """See Decoder.take_kv_scales."""
        self.paged.kv_scales = dict(enumerate(scales))

    def _replace(self) -> None:
        """Replace transformers' layers by the engine's, and request the weights of all."""
        plan = TensorPlan(self.causal, self.parts)
        table, head = self.causal.get_input_embeddings(), self.causal.get_output_embeddings()
        if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear):
            kind = self.causal.config.model_type
            raise ModelError(f"{kind!r} cannot be served through transformers: it has no plain token vectors and head")
        for name, module in list(self.causal.named_modules()):
            if (group := fuse_mlp(name, module, plan, self._ops, self._base)) is not None:
                self._groups.append(group)
        for name, module in list(self.causal.named_modules()):
            if module is table:
                self._embedding_name = self._base(f"{name}.weight")
                become(module, EmbeddingModule, engine=self.embedding)
            elif module is head:
                self._head_name = self._base(f"{name}.weight")
                become(module, HeadModule, engine=self.lm_head)
            elif isinstance(module, (nn.Linear, ConvModule.__bases__[0])):
                self._replace_linear(name, module, plan)
            self._keep(name, module)

    def _replace_linear(self, name: str, module: Any, plan: TensorPlan) -> None:
        transposed = not isinstance(module, nn.Linear)
        linear = plan.linear(name, module, transposed=transposed)
        self._groups.append(linear.group(self._base(f"{name}.weight")))
        module.bias = None
        num_outputs = sum(part.size for part in linear.shape.outputs)
        become(module, ConvModule if transposed else LinearModule, engine=linear, num_outputs=num_outputs)

    def _keep(self, name: str, module: Any) -> None:
        """Request the tensors that a module keeps: norms, positions, sinks."""
        buffers = {key: held for key, held in module._buffers.items() if key not in module._non_persistent_buffers_set}  # noqa: SLF001
        for key, tensor in (module._parameters | buffers).items():  # noqa: SLF001
            if tensor is None:
                continue
            full = f"{name}.{key}" if name else key
            slot = whole_slot(self._names.stored(full), *tensor.shape)
            dtype = torch.float32 if self._is_wide(full) else self.parts.dtype
            stack = WeightStack((slot,), dtype, self.parts.device)
            self._groups.append(WeightGroup((stack,), partial(_set, module, key)))

    def _base(self, parameter: str) -> str:
        """The checkpoint's name of a matrix, without ".weight". Raises ModelError if it has another ending."""
        stored = self._names.stored(parameter)
        if not stored.endswith(".weight"):
            raise ModelError(f"the checkpoint has {parameter} as {stored}; its name must end with .weight")
        return stored.removesuffix(".weight")

    def _is_wide(self, name: str) -> bool:
        """Whether transformers keeps a tensor in float32 regardless of the model's dtype."""
        model = self.causal
        kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        if self.parts.dtype == torch.float16:
            kept += getattr(model, "_keep_in_fp32_modules", None) or ()
        return any(part in name.split(".") for part in kept)


class _Given(nn.Module):
    """Replaces the body of a causal model whose result is already computed.

    Some models pass it `input_ids` by position, call the decoder within it, or read attributes that only some bodies
    return.
    """

    @property
    def decoder(self) -> "_Given":
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


def _set(module: Any, key: str, tensor: torch.Tensor) -> None:
    held = module._parameters if key in module._parameters else module._buffers  # noqa: SLF001
    held[key] = nn.Parameter(tensor, requires_grad=False) if held is module._parameters else tensor  # noqa: SLF001


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors*"))
