"""Token embedding and LM head, with the vocabulary split over ranks; one tensor serves both if they are tied."""

from collections.abc import Callable, Collection, Sequence

import torch

from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Split
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu.weights.linear import PackedWeight, look_up
from vllm_lite.layers.weights.matmul import DenseMatmul, Matmul, NativeMatmul, copies, keep_rows, make_matmul, packs
from vllm_lite.layers.weights.weight_form import DENSE, LinearShape, StoredWeight, WeightForm
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack
from vllm_lite.parallel.communicator import Communicator


class Embedding:
    """Looks up token vectors: [vocab_size, hidden_size], of which this rank holds the rows `vocabulary`."""

    weight: torch.Tensor  # by `load`, if not `share`

    def __init__(
        self,
        vocabulary: Split,
        hidden_size: int,
        communicator: Communicator,
        *,
        dtype: torch.dtype,
        device: torch.device,
        form: WeightForm = DENSE,
    ) -> None:
        self.form = form
        self.vocabulary = vocabulary
        self.hidden_size = hidden_size
        self.communicator = communicator
        self.dtype = dtype
        self.device = device
        self.packed: PackedWeight | None = None
        self.native = device.type == "cpu" and cpu.available()

    def load(self, weight: torch.Tensor) -> None:
        """Keep `weight`: [this rank's part of vocab_size, hidden_size]."""
        self.weight = weight

    def share(self, packed: PackedWeight) -> None:
        """Look up in a packed weight with the same rows, mostly the LM head's, instead of a table.

        This takes 4 us per token instead of 0.3, and saves a copy of often a quarter of a small model's weights.
        """
        self.packed = packed

    def load_quantized(self, stored: StoredWeight, tensors: Sequence[torch.Tensor]) -> None:
        """Load a matrix that is quantized in the checkpoint; it stays quantized if native kernels can multiply it."""
        if copies(self.dtype, self.device):
            self.share_with(stored.matmul(tensors, None), lambda: stored.dense(tensors))
        else:
            self.load(stored.dense(tensors))

    def share_with(self, matmul: Matmul, make_table: Callable[[], torch.Tensor]) -> None:
        """Look up in the weight of `matmul`, with the same rows, or if its form has no lookup, in a new table."""
        if isinstance(matmul, NativeMatmul) and self.dtype in matmul.packed.row_types:
            self.share(matmul.packed)
        elif isinstance(matmul, DenseMatmul):
            self.load(matmul.weight)
        else:
            self.load(make_table())

    def slot(self, name: str) -> WeightSlot:
        """This rank's rows of the checkpoint tensor `<name>.weight`."""
        rows, size = self.vocabulary, self.hidden_size
        return WeightSlot(f"{name}.weight", (rows.total, size), (rows.start, 0), (rows.size, size))

    @property
    def shape(self) -> LinearShape:
        """Shape of the matrix: its outputs are tokens."""
        return LinearShape(Split.whole(self.hidden_size), (self.vocabulary,), self.dtype, self.device)

    def group(self, name: str) -> WeightGroup:
        """Request the checkpoint's matrix `name`."""
        if not self.form.quantizes(name):
            return WeightGroup((WeightStack((self.slot(name),), self.dtype, self.device),), self.load)
        stored = self.form.stored((name,), self.shape)
        return WeightGroup(stored.stacks, lambda *tensors: self.load_quantized(stored, tensors))

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """token_ids: int [num_tokens], out: [num_tokens, hidden_size]. Ids outside the vocabulary: IndexError.

        Each token's vector comes from the rank that holds it; the other ranks add zeros, so the sum is exact.
        """
        if self.packed is not None:
            self.packed.rows(token_ids, out, self.vocabulary)
        elif not (self.native and look_up(self.weight, token_ids, out, self.vocabulary)):
            _select_rows(self.weight, token_ids, out, self.vocabulary)
        self.communicator.all_reduce(out)


def _select_rows(weight: torch.Tensor, token_ids: torch.Tensor, out: torch.Tensor, held: Split) -> None:
    """`look_up` in plain torch. Ids outside the vocabulary are an IndexError on a CPU."""
    if held.is_whole:
        torch.index_select(weight, 0, token_ids, out=out)
        return
    if token_ids.device.type == "cpu" and ((token_ids < 0) | (token_ids >= held.total)).any():
        raise IndexError(f"ids must lie in [0, {held.total}), got {token_ids.tolist()}")
    others = (token_ids < held.start) | (token_ids >= held.end)
    torch.index_select(weight, 0, (token_ids - held.start).masked_fill_(others, 0), out=out)
    out.masked_fill_(others[:, None], 0)


class LMHead:
    """Scores this rank's part of the vocabulary: logits = hidden W^T, with W: [part, hidden_size].

    A tied head is loaded together with the embedding, from the same tensor.
    """

    matmul: Matmul  # by `load`

    def __init__(
        self,
        embedding: Embedding,
        *,
        tied: bool,
        quantization: Quantization | None = None,
        exact_rows: bool = False,
    ) -> None:
        """`exact_rows`: if a dense tensor is quantized on loading, do not round input rows, see `keep_rows`."""
        self.embedding = embedding
        self.tied = tied
        self.quantization = quantization
        self.exact_rows = exact_rows

    def load(self, weight: torch.Tensor) -> None:
        """weight: [this rank's part of vocab_size, hidden_size]. If tied, the embedding shares the head's packed
        weight, or keeps `weight` if it cannot look up in that."""
        self.matmul = make_matmul(weight, None, self.quantization)
        if self.exact_rows:
            keep_rows(self.matmul)
        if self.tied and self.quantization is None:
            self.embedding.share_with(self.matmul, lambda: weight)
        elif self.tied:
            self.embedding.load(weight)

    def load_quantized(self, stored: StoredWeight, tensors: Sequence[torch.Tensor]) -> None:
        """Load a matrix that is quantized in the checkpoint."""
        self.matmul = stored.matmul(tensors, None)
        if self.tied:
            self.embedding.share_with(self.matmul, lambda: stored.dense(tensors))

    def group(self, name: str) -> WeightGroup:
        """Request the checkpoint's matrix `name`."""
        table = self.embedding
        if table.form.quantizes(name):
            stored = table.form.stored((name,), table.shape)
            return WeightGroup(stored.stacks, lambda *tensors: self.load_quantized(stored, tensors))
        lent = copies(table.dtype, table.device) and not (self.tied and self.quantization)
        packed_as = packs(table.dtype, table.device, self.quantization) if lent else None
        stack = WeightStack((table.slot(name),), table.dtype, table.device, lent, packed_as=packed_as)
        return WeightGroup((stack,), self.load)

    is_whole = True
    """Whether all tokens of this rank are scored."""

    @property
    def columns(self) -> Collection[slice]:
        """Ranges of tokens that are scored."""
        held = self.embedding.vocabulary
        return (slice(held.start, held.end),)

    def forward(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [num_rows, hidden_size], out: float32 [num_rows, vocab_size]. Writes only the `columns`."""
        held = self.embedding.vocabulary
        self.matmul.forward(hidden, out.narrow(1, held.start, held.size))
