"""Images whose tokens attend to each other in both directions, over a backend whose kernels are causal.

The backend computes all rows of a step causally. Then the rows of images are computed again in plain torch: each image
as a sequence that ends with the image, over the blocks of its real sequence. A step computes all missing tokens of an
image, so K and V of the whole image are in the cache by then.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lite.attention.backend import Attend, AttentionBackend, AttentionShape, Heads, LoadsKernels
from vllm_lite.attention.reference import ReferenceBackend
from vllm_lite.attention.step_batch import StepBatch, WholeImage, to_device
from vllm_lite.checkpoint.tensors.kv_scales import KVScales


class _Plan(NamedTuple):
    """The images of a step as a batch; `rows`: their rows in the step, int64 [num_rows]."""

    batch: StepBatch
    rows: torch.Tensor


class WholeImages(AttentionBackend):
    """Attention by `inner`, with the rows of images computed by the reference."""

    sees_images = True

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner.shape)
        self.inner = inner
        self.graph_safe = inner.graph_safe
        self.fuses_norms = inner.fuses_norms
        self._plain = ReferenceBackend(inner.shape)

    @classmethod
    def supports(cls, shape: AttentionShape) -> str | None:  # noqa: ARG003
        return "it adds to another backend"

    @property
    def layout_name(self) -> str:
        return self.inner.layout_name

    def load_kernels(self) -> None:
        """See LoadsKernels."""
        if isinstance(self.inner, LoadsKernels):
            self.inner.load_kernels()

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int, max_seq_len: int) -> int:
        """Workspace of the backend, and of the largest image in the reference."""
        whole = (spec for spec in self.shape.groups if spec.whole_images)
        own = max(self._plain.group_bytes(spec, min(spec.whole_images, max_num_tokens), max_seq_len) for spec in whole)
        return own + self.inner.workspace_bytes(max_num_tokens, max_num_seqs, max_seq_len)

    def prepare(self, batch: StepBatch) -> None:
        self.inner.prepare(batch)
        batch.image_plan = self._planned(batch) if batch.images else None

    def _planned(self, batch: StepBatch) -> _Plan:
        """Make the batch of images; its lengths stay on the host, where the reference reads them."""
        images, own, start = batch.images, list[WholeImage](), 0
        for index, image in enumerate(images):
            own.append(WholeImage(index, start, image.num_rows, image.end))
            start += image.num_rows
        rows = np.concatenate([np.arange(each.first_row, each.first_row + each.num_rows) for each in images])
        sequences = to_device(np.array([each.sequence for each in images]), batch.token_ids.device)
        apart = StepBatch(
            num_tokens=start,
            num_seqs=len(images),
            max_query_len=max(each.num_rows for each in images),
            max_seq_len=max(each.end for each in images),
            token_ids=batch.token_ids[:0],
            positions=batch.positions[:0],
            query_start_loc=torch.tensor([*(each.first_row for each in own), start], dtype=torch.int32),
            seq_lens=torch.tensor([each.end for each in own], dtype=torch.int32),
            block_tables=tuple(table[sequences] for table in batch.block_tables),
            slot_mapping=(),
            images=tuple(own),
        )
        self._plain.prepare(apart)
        return _Plan(apart, to_device(rows, batch.token_ids.device))

    def refresh(
        self, batch: StepBatch, seq_lens: NDArray[np.integer[Any]], tables: Sequence[NDArray[np.int32]] = ()
    ) -> None:
        self.inner.refresh(batch, seq_lens, tables)

    def write_kv(
        self, heads: Heads, kv: torch.Tensor, batch: StepBatch, group: int, scales: KVScales | None = None
    ) -> None:
        self.inner.write_kv(heads, kv, batch, group, scales)

    def attend_layer(self, call: Attend, batch: StepBatch) -> None:
        self.inner.attend_layer(call, batch)
        plan: _Plan | None = batch.image_plan
        if plan is None or not self.shape.groups[call.group].whole_images:
            return
        query = call.query[plan.rows]
        out = query.new_empty(len(plan.rows), *call.out.shape[1:])
        self._plain.attend_layer(call._replace(query=query, out=out, new=None), plan.batch)
        call.out.index_copy_(0, plan.rows, out)
