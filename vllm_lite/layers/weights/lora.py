"""Adapters of a model's linear layers, attached through the form of weights, so that models need not know of them.

`Adapters.form` wraps another WeightForm. To the product with each weight the adapters of the rows are added. Adapters
are split over ranks like their layers: of a layer that is split by outputs a rank holds all of A and its part of B, of
one that is split by inputs its part of A and all of B. The partial sums of the latter are reduced with those of the
weight.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from vllm_lite.checkpoint.model_spec import ModelSpec
from vllm_lite.checkpoint.quantization.spec import Gguf
from vllm_lite.checkpoint.shard import HeadSplit, Split
from vllm_lite.checkpoint.tensors.headers import TensorPlace, shown
from vllm_lite.checkpoint.tensors.lora import LM_HEAD, MAX_SHOWN, LoraCheckpoint, LoraModule
from vllm_lite.errors import ConfigError, ModelError
from vllm_lite.kernels.cpu.weights.lora import Lengths, LoraSlots
from vllm_lite.layers.attention.qkv_layout import qkv_splits
from vllm_lite.layers.weights import gpu_matmul
from vllm_lite.layers.weights.adapter_rows import AdapterMask, AdapterRows, GroupedRows, LaunchedRows
from vllm_lite.layers.weights.dora import adapted_lengths, can_read, lengths_of
from vllm_lite.layers.weights.matmul import Matmul, copies
from vllm_lite.layers.weights.weight_form import LinearShape, StoredWeight, WeightForm, WrappedForm, WrappedWeight
from vllm_lite.layers.weights.weight_slot import WeightSlot

if TYPE_CHECKING:  # other devices need none of it
    from vllm_lite.kernels.cuda.launcher import Launcher

TABLES = "; token vectors are on CPUs, where vocabulary times max_loras times max_lora_rank take at most 1 GiB"
HEADS = "; LM heads are on CPUs"

Matrices = Sequence[torch.Tensor | None]
_Stacked = tuple[Matrices, Matrices, Lengths | None]


class AdapterLimits(NamedTuple):
    """Bounds on the adapters of a step, and on their ranks."""

    num_slots: int
    max_rank: int


class LayerSlots(Protocol):
    """The adapters of one layer, in slots, and their products with the rows that use them."""

    def pack(self, down: Matrices, up: Matrices, lengths: Lengths | None = None) -> Any:
        """See LoraSlots.pack."""
        ...

    def put(self, slot: int, packed: Any) -> None:
        """Put a packed adapter into `slot`; None: empty the slot."""
        ...

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' outputs to `out`: [n, sum of outputs]; x: [n, inputs], the current rows."""
        ...


class Adapters:
    """The adapters of one model and the layers that can have them. Layers register when they request their weights."""

    def __init__(self, limits: AdapterLimits, max_num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.limits, self.max_num_tokens, self.dtype, self.device = limits, max_num_tokens, dtype, device
        self.rows: AdapterRows
        if copies(dtype, device):
            self.rows = GroupedRows(limits.num_slots, max_num_tokens)
        elif (launcher := gpu_matmul.launcher_for(dtype, device)) is not None:
            self.rows, self.launcher = LaunchedRows(limits.num_slots, max_num_tokens, device), launcher
        else:
            self.rows = AdapterMask(limits.num_slots, max_num_tokens, dtype, device)
        self.sites: dict[str, Site] = {}
        """Name of a matrix -> its layer."""
        self.tables: dict[str, AdaptedPart] = {}
        """Name -> embedding."""
        self.others: dict[str, AdaptedPart] = {}
        """Name -> LM head, or matrix of all experts."""
        self.stored_rows: Callable[[str], Sequence[int] | None] = lambda _: None
        """Name of a matrix -> the row of an adapter's B for each of its rows in the base model's files; None: the same
        rows."""

    def form(self, form: WeightForm) -> "AdaptedForm":
        """Wrap `form` for layers that can have adapters."""
        return AdaptedForm(form, self)

    def site(self, names: Sequence[str], shape: LinearShape) -> "Site":
        """Register the layer of these projections, or return it if it is registered."""
        known = self.sites.get(names[0])
        if known is not None:
            return known
        site = Site(tuple(dict.fromkeys(names)), names, shape, self)
        self.sites.update(dict.fromkeys(site.matrices, site))
        return site

    def read(self, checkpoint: LoraCheckpoint, label: str) -> "LoadedAdapter":
        """Read this rank's part of an adapter. Raises ModelError, with its `label`, unless it fits this model."""
        by_site: dict[AdaptedPart, dict[str, LoraModule]] = {}
        unknown = []
        for name, module in checkpoint.modules.items():
            of_layer = self.others if name in self.others else self.sites
            parts: Mapping[str, AdaptedPart] = self.tables if module.is_table else of_layer
            known = name if name in parts else f"model.{name}"  # made for a model without its head
            if (site := parts.get(known)) is None:
                unknown.append(name)
            else:
                by_site.setdefault(site, {})[known] = module
        if unknown:
            more = f" and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
            tables = any(checkpoint.modules[name].is_table for name in unknown)
            heads = HEADS if LM_HEAD in unknown else ""
            raise ModelError(
                f"{label} adapts {', '.join(map(shown, unknown[:MAX_SHOWN]))}{more}: not layers of this model that can "
                f"be adapted here{TABLES if tables else heads}"
            )
        if checkpoint.max_rank > self.limits.max_rank:
            raise ModelError(
                f"{label} has rank {checkpoint.max_rank}, and max_lora_rank is {self.limits.max_rank}; start with "
                f"--max-lora-rank {checkpoint.max_rank} or more"
            )
        for site, found in by_site.items():  # check all before reading the first, which may be of any size
            site.check(found, label)
        try:
            return LoadedAdapter([(site, site.read(found)) for site, found in by_site.items()])
        except OSError as error:
            raise ModelError(f"{checkpoint.file}: cannot be read ({error})") from error

    def put(self, slot: int, adapter: "LoadedAdapter | None", instead_of: "LoadedAdapter | None") -> None:
        """Put `adapter` or None into `slot`, which holds `instead_of`. No step may be running."""
        for site, _ in [] if instead_of is None else instead_of.parts:
            site.put(slot, None)
        for site, packed in [] if adapter is None else adapter.parts:
            site.put(slot, packed)


class LoadedAdapter(NamedTuple):
    """One adapter in memory, ready for a slot."""

    parts: "list[tuple[AdaptedPart, Any]]"


class AdaptedPart(Protocol):
    """A part of the model that can have adapters."""

    def check(self, modules: Mapping[str, LoraModule], label: str) -> None:
        """Raise ModelError, with the adapter's `label`, for matrices of other shapes than this part's."""
        ...

    def read(self, modules: Mapping[str, LoraModule]) -> Any:
        """Read and pack this rank's part of an adapter's `modules`, which check() has passed. Raises OSError."""
        ...

    def put(self, slot: int, packed: Any) -> None:
        """Put the result of `read` into `slot`; None: empty the slot."""
        ...


class Site:
    """One linear layer that can have adapters, of one or more projections of the same input."""

    def __init__(self, matrices: tuple[str, ...], names: Sequence[str], shape: LinearShape, adapters: Adapters) -> None:
        """`names`: the matrix that contains each projection."""
        self.matrices, self.names, self.shape = matrices, tuple(names), shape
        self.stored_rows = adapters.stored_rows
        self.weight: Matmul | None = None
        self.bias: torch.Tensor | None = None
        """Matrix and bias of the base model, once they are loaded."""
        matrix = [matrices.index(name) for name in names]
        self.slots: LayerSlots
        if isinstance(adapters.rows, GroupedRows):
            self.slots = NativeSlots(adapters.limits, shape, matrix, adapters.rows)
        elif isinstance(adapters.rows, LaunchedRows):
            try:
                self.slots = LaunchedSlots(adapters.limits, shape, matrix, adapters.rows, adapters.launcher)
            except ValueError as error:  # recurrent layers, say
                raise ConfigError(
                    f"enable_lora is not for this model on a GPU, whose kernel does not take {names[0]} with what is "
                    f"multiplied beside it: {error}"
                ) from error
        elif isinstance(adapters.rows, AdapterMask):
            self.slots = StackedSlots(adapters.limits, shape, matrix, adapters.rows)

    def put(self, slot: int, packed: Any) -> None:
        """See AdaptedPart.put."""
        self.slots.put(slot, packed)

    def check(self, modules: Mapping[str, LoraModule], label: str) -> None:
        """See AdaptedPart.check."""
        for name, module in modules.items():
            check_matrices(name, module, self.shape.inputs.total, self._outputs(name), label)
            if module.magnitude is not None:
                self._check_lengths(name, module.magnitude, label)

    def _check_lengths(self, name: str, magnitude: TensorPlace, label: str) -> None:
        if magnitude.shape != (self._outputs(name),):
            raise ModelError(
                f"{label} was made for another base model: it has {list(magnitude.shape)} lengths (DoRA) of rows of "
                f"{name}, this model needs {[self._outputs(name)]}"
            )
        if not (self.shape.inputs.is_whole and self.shape.device.type == "cpu" and can_read(self.weight)):
            raise ModelError(
                f"{label} has lengths (DoRA) of rows of {name}, which are served on a CPU with native kernels, on one "
                "rank, of linear layers"
            )

    def read(self, modules: Mapping[str, LoraModule]) -> Any:
        """See AdaptedPart.read."""
        down = {name: read_tensor(module.down) for name, module in modules.items()}
        up = {name: read_tensor(module.up).float() * module.scale for name, module in modules.items()}
        return self.packed(down, up, modules)

    def packed(
        self,
        down: Mapping[str, torch.Tensor],
        up: Mapping[str, torch.Tensor],
        modules: Mapping[str, LoraModule] = MappingProxyType({}),
    ) -> Any:
        """Pack this rank's part of matrices A and B by name, B scaled in float32. `modules`: their DoRA magnitudes."""
        inputs, dtype = self.shape.inputs, self.shape.dtype
        place = self.shape.device
        firsts = [
            down[name][:, inputs.start : inputs.end].to(dtype).contiguous().to(place) if name in down else None
            for name in self.matrices
        ]
        wide = [
            self._rows(name, part, up[name]) if name in up else None
            for name, part in zip(self.names, self.shape.outputs, strict=True)
        ]
        seconds = [None if rows is None else rows.to(dtype).to(place) for rows in wide]
        return self.slots.pack(firsts, seconds, self._lengths(modules, down, wide))

    def _rows(self, name: str, part: Split, whole: torch.Tensor) -> torch.Tensor:
        """A rank's rows of an adapter's tensor with one entry for each row of the matrix `name`."""
        rows = self.stored_rows(name)
        return rows_of(part, whole if rows is None else whole[list(rows)])

    def _lengths(
        self, modules: Mapping[str, LoraModule], down: Mapping[str, torch.Tensor], wide: Matrices
    ) -> Lengths | None:
        """Factors and terms of the outputs for an adapter with DoRA magnitudes; None without."""
        if self.weight is None or not any(module.magnitude for module in modules.values()):
            return None
        gains, first = [], 0
        for name, part, up in zip(self.names, self.shape.outputs, wide, strict=True):
            if up is None or (place := modules[name].magnitude) is None:
                gains.append(torch.ones(part.size))
            else:
                own = self._rows(name, part, read_tensor(place).float()[:, None])[:, 0]
                gains.append(own / adapted_lengths(self.weight, first, up, down[name].float()))
            first += part.size
        return lengths_of(torch.cat(gains), self.bias)

    def _outputs(self, name: str) -> int:
        return self.shape.outputs[self.names.index(name)].total


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def check_matrices(name: str, module: LoraModule, inputs: int, outputs: int, label: str, num_experts: int = 0) -> None:
    """Raise ModelError unless an adapter's A and B have the shapes for a matrix `name`, [outputs, inputs], or for those
    of `num_experts`, concatenated."""
    rank = module.rank * (num_experts or 1)
    wanted, found = ((rank, inputs), (outputs, rank)), (module.down.shape, module.up.shape)
    if module.num_experts != num_experts or found != wanted:
        raise ModelError(
            f"{label} was made for another base model: its matrices of {name} are {list(found[0])} and "
            f"{list(found[1])}, this model needs {list(wanted[0])} and {list(wanted[1])}"
        )


def read_tensor(place: TensorPlace) -> torch.Tensor:
    """Read a matrix. safetensors' safe_open leaks about 1 KB per file, and its load() reads the whole file."""
    return torch.frombuffer(place.read(), dtype=_DTYPES[place.dtype]).view(place.shape)


def rows_of(rows: Split, up: torch.Tensor) -> torch.Tensor:
    """The part `rows` of the rows of B."""
    size, start = (rows.size, up.shape[1]), (rows.start, 0)
    return WeightSlot("", (rows.total, up.shape[1]), start, size, rows.order).cut(up)


class NativeSlots:
    """References to packed adapters, which the CPU's kernel finds by slot; putting an adapter copies nothing."""

    def __init__(self, limits: AdapterLimits, shape: LinearShape, matrix: Sequence[int], rows: GroupedRows) -> None:
        self.rows = rows
        self.slots = LoraSlots(limits.num_slots, shape.inputs.size, [part.size for part in shape.outputs], matrix)
        self.pack, self.put = self.slots.pack, self.slots.put

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.slots.add(x, *self.rows.current, out)


class LaunchedSlots:
    """Adapters on a GPU, for kernels that take rows grouped by adapter."""

    def __init__(
        self, limits: AdapterLimits, shape: LinearShape, matrix: Sequence[int], rows: LaunchedRows, launcher: "Launcher"
    ) -> None:
        from vllm_lite.kernels.cuda.weights import lora

        self.rows, self.launcher, self._add = rows, launcher, lora.add
        sizes, like = [part.size for part in shape.outputs], torch.empty(0, dtype=shape.dtype, device=shape.device)
        self.stack = lora.LoraStack.empty(*limits, shape.inputs.size, sizes, matrix, like)
        rows.reserve(self.stack.down.shape[1])

    def pack(self, down: Matrices, up: Matrices, lengths: Lengths | None = None) -> tuple[Matrices, Matrices]:
        del lengths  # Site rejects adapters with them
        return down, up

    def put(self, slot: int, packed: tuple[Matrices, Matrices] | None) -> None:
        stack = self.stack
        stack.down[slot], stack.up[slot], stack.ranks[slot] = 0, 0, 0
        if packed is None:
            return
        for number, each in enumerate(packed[0]):
            if each is not None:
                first = number * stack.rank
                stack.down[slot, first : first + len(each)] = each
        columns = stack.up[slot].split(stack.sizes, dim=1)
        for part, rows in zip(columns, packed[1], strict=True):
            if rows is not None:
                part[: rows.shape[1]] = rows.t()
        stack.ranks[slot] = max(len(each) for each in packed[0] if each is not None)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if not self.rows.is_idle:
            self._add(self.launcher, self.stack, self.rows.current, x, out, self.rows.hidden)


class StackedSlots:
    """Adapters in plain torch, on any device: products with all slots, of which a mask keeps each row's own.

    Only the mask depends on the rows' adapters, so a captured step can be replayed for any.
    """

    def __init__(self, limits: AdapterLimits, shape: LinearShape, matrix: Sequence[int], rows: AdapterMask) -> None:
        self.rows = rows
        num_slots, rank = limits
        zeros = partial(torch.zeros, dtype=shape.dtype, device=shape.device)
        self.matrix = tuple(matrix)
        self.down = zeros((max(matrix) + 1, num_slots, rank, shape.inputs.size))
        self.up = [zeros((num_slots, rank, part.size)) for part in shape.outputs]
        self.lengths: dict[int, Lengths] = {}
        """Slot -> DoRA lengths; on a CPU only."""

    def pack(self, down: Matrices, up: Matrices, lengths: Lengths | None = None) -> _Stacked:
        return down, up, lengths

    def put(self, slot: int, packed: _Stacked | None) -> None:
        self.lengths.pop(slot, None)
        self.down[:, slot] = 0
        for part in self.up:
            part[slot] = 0
        if packed is None:
            return
        down, up, lengths = packed
        if lengths is not None:
            self.lengths[slot] = lengths
        for stacked, each in zip(self.down, down, strict=True):
            if each is not None:
                stacked[slot, : len(each)] = each
        for part, rows in zip(self.up, up, strict=True):
            if rows is not None:
                part[slot, : rows.shape[1]] = rows.t()

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.rows.is_idle:
            return
        mask = self.rows.current[: len(x)]
        hidden = [(x @ one.flatten(0, 1).t()).view(len(x), *one.shape[:2]) * mask[:, :, None] for one in self.down]
        first = 0
        for matrix, part in zip(self.matrix, self.up, strict=True):
            added = hidden[matrix].flatten(1) @ part.flatten(0, 1)
            out[:, first : first + part.shape[2]] += added
            first += part.shape[2]
        for slot, own in self.lengths.items():
            rows = mask[:, slot].nonzero()[:, 0]
            out[rows] = (out[rows].float() * own.gain + own.shift).to(out.dtype)


@dataclass(frozen=True, slots=True)
class AdaptedForm(WrappedForm):
    """Adapters add to the products of weights."""

    adapters: Adapters

    def stored(self, names: Sequence[str], shape: LinearShape) -> StoredWeight:
        return AdaptedWeight(self.form.stored(names, shape), self.adapters.site(names, shape))


@dataclass(frozen=True, slots=True)
class AdaptedWeight(WrappedWeight):
    """A weight whose product is followed by those of the adapters."""

    site: Site

    def matmul(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        self.site.weight, self.site.bias = self.stored.matmul(tensors, bias), bias
        return AdaptedMatmul(self.site.weight, self.site)


class AdaptedMatmul:
    """The product with a weight, plus those with the adapters of its layer."""

    def __init__(self, matmul: Matmul, site: Site) -> None:
        self.matmul, self.site = matmul, site

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.matmul.forward(x, out)
        self.site.slots.add(x, out)


# ---- Order of rows: adapters have the rows of the family's own checkpoints, other files may have another order


_PROJECTION = re.compile(r"[^0-9]*\.(\d{1,6})\..*\.(q_proj|k_proj|query_key_value)")


def stored_rows(spec: ModelSpec, name: str) -> list[int] | None:
    """Return the family's row for each row of the matrix `name` in the files of `spec`; None: they are the same."""
    moved = spec.quantization.qkv_rows if isinstance(spec.quantization, Gguf) else None
    found = None if moved is None else _PROJECTION.fullmatch(name)
    if found is None:
        return None
    attention, is_fused = spec.layers[int(found[1])].attention, found[2] == "query_key_value"
    num_heads, num_kv, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    if moved == "turned":
        starts = range(0, (num_heads if found[2] == "q_proj" else num_kv) * size, size)
        return [start + row for start in starts for pair in zip(*_halves(size), strict=True) for row in pair]
    if not is_fused:
        return None
    whole = HeadSplit(Split.whole(num_heads), Split.whole(num_kv))
    return [row for part in qkv_splits(attention, whole, "by head", None) for row in part.order or _rows(part)]


def _halves(size: int) -> tuple[range, range]:
    return range(size // 2), range(size // 2, size)


def _rows(part: Split) -> range:
    return range(part.start, part.end)
