"""Grouped weights: unpacked quantized weights. Every format of checkpoints is converted to them, and kernels pack
them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from vllm_lite.checkpoint.quantization.on_load import GROUPS, SUPER_INPUTS, Form


class GroupedWeight(NamedTuple):
    """weight[n, k] = values[codes[n, k]] * scales[n, k // group_size] - minima[n, k // group_size].

    `values` has the value of each code, so integers with and without a zero point, floats of 8 bits and tables like NF4
    have the same form. It is temporary: one weight is unpacked to it, then packed from it.
    """

    codes: torch.Tensor
    """uint8 [num_outputs, num_inputs], each less than len(values)."""
    values: torch.Tensor
    """float32 [16], [256], or [32] consecutive numbers."""
    scales: torch.Tensor
    """float32 [num_outputs, groups]; the last group may be shorter."""
    group_size: int
    """Inputs that share a scale; num_inputs if an output has one scale."""
    minima: torch.Tensor | None = None
    """float32 [num_outputs, groups]: numbers to subtract; for a zero point z, z * scale. None: zeros."""
    order: torch.Tensor | None = None
    """int64 [num_inputs]: column k of the codes is for input order[k], if columns were sorted by group. None: they were
    not."""

    @property
    def shape(self) -> tuple[int, int]:
        """[num_outputs, num_inputs]."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return {16: 4, 32: 5}.get(len(self.values), 8)


class GroupedChunks(NamedTuple):
    """A grouped weight that is created some rows at a time, because the codes of the whole weight would take a byte per
    weight."""

    shape: tuple[int, int]
    """[num_outputs, num_inputs]."""
    num_rows: int
    """Rows at a time: a multiple of 32, because 32 rows are packed together."""
    make: Callable[[slice], GroupedWeight]
    """Creates the given rows, of which there is at least one. If they are to be packed, their columns have no
    `order`."""

    @property
    def form(self) -> GroupedWeight:
        """One row, for the properties that all rows share."""
        return self.make(slice(0, 1))

    def each(self) -> Iterator[GroupedWeight]:
        for start in range(0, self.shape[0], self.num_rows):
            yield self.make(slice(start, start + self.num_rows))

    def dense(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Dequantize to `dtype` on `device`."""
        table = torch.empty(self.shape, dtype=dtype, device=device)
        for chunk, rows in zip(self.each(), table.split(self.num_rows), strict=True):
            rows.copy_(dequantize(chunk))
        return table


INT4 = torch.arange(-8, 8, dtype=torch.float32)
"""The values of codes that are symmetric integers plus 8."""
UINT4 = torch.arange(16, dtype=torch.float32)
INT5 = torch.arange(-16, 16, dtype=torch.float32)
UINT5 = torch.arange(32, dtype=torch.float32)
INT8 = torch.arange(-128, 128, dtype=torch.float32)
"""The values of codes that are symmetric integers plus 128."""
UINT8 = torch.arange(256, dtype=torch.float32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""The values of codes that are the bits of torch.float8_e4m3fn."""
E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
"""The values of codes that are floats of 4 bits: a sign, 2 bits of an exponent and 1 of a fraction."""


def dequantize(weight: GroupedWeight) -> torch.Tensor:
    """Dequantize to float32 [num_outputs, num_inputs], with columns in the order of inputs: the reference of all
    kernels."""
    dense, size = _looked_up(weight), weight.group_size
    num_whole = weight.shape[1] // size
    _apply(dense[:, : num_whole * size].unflatten(1, (num_whole, size)), weight, slice(num_whole))
    if weight.shape[1] % size:
        _apply(dense[:, num_whole * size :].unsqueeze(1), weight, slice(num_whole, num_whole + 1))
    if weight.order is None:
        return dense
    return torch.empty_like(dense).index_copy_(1, weight.order, dense)


def _looked_up(weight: GroupedWeight) -> torch.Tensor:
    """values[codes]. If the values are consecutive integers, computes a sum instead, which takes a tenth of the
    time."""
    first = weight.values[0]
    if torch.equal(weight.values, torch.arange(len(weight.values)) + first):
        return weight.codes.to(torch.float32, memory_format=torch.contiguous_format).add_(first)
    return weight.values.index_select(0, weight.codes.flatten().int()).view(weight.codes.shape)


def _apply(dense: torch.Tensor, weight: GroupedWeight, groups: slice) -> None:
    """Multiply dense, [num_outputs, groups, size], by the scales of these groups and subtract their minima."""
    dense *= weight.scales[:, groups].unsqueeze(-1)
    if weight.minima is not None:
        dense -= weight.minima[:, groups].unsqueeze(-1)


VALUES: Mapping[Form, torch.Tensor] = {
    "int8": UINT8,
    "fp8": E4M3,
    "int4": UINT4,
    "int4_g32": UINT4,
    "int5_g32": UINT5,
    "int8_g128": UINT8,
}
"""Values of the codes of each form that dense weights take when they are loaded."""
STEPS4 = tuple(13 + i / 4 for i in range(16))
"""Candidates in the search for a group's scale and minimum: the number of steps, for codes up to 15, into which the
range of the group is divided; kSteps4 in csrc/cpu/isa/quantize.cpp."""
STEPS8 = tuple(127.5 - i / 2 for i in range(16))
"""Candidates in the search for a group's scale without a minimum: the number of steps that the largest weight of the
group becomes."""


def quantize(weight: torch.Tensor, form: Form, *, group_size: int | None = None) -> GroupedWeight:
    """Quantize a weight, float [num_outputs, num_inputs], as `--quantization` does on a CPU. Scales and minima are
    float16 numbers for int8 and bfloat16 numbers for 4 bits; in small groups of 4 bits, they are integers times floats
    that SUPER_INPUTS inputs share. `group_size`: None means that of GROUPS."""
    size, parts = group_size or GROUPS[form], weight.split(_ROWS_AT_A_TIME)
    if form == "fp8":
        return quantize_fp8(weight)
    if form in ("int8", "int8_g128"):
        return _joined([_quantize8_rows(rows, size) for rows in parts])
    return _joined([_quantize_rows(rows, size, VALUES[form], integers=size < GROUPS["int4"]) for rows in parts])


def quantize_on_gpu(weight: torch.Tensor, form: Form) -> GroupedWeight:
    """Quantize for a GPU, whose kernels have no integer scales and multiply symmetric 8-bit codes faster: all scales
    and minima are bfloat16 numbers, and int8 has no minima."""
    if form == "fp8":
        return quantize_fp8(weight)
    parts = weight.split(_ROWS_AT_A_TIME)
    if form in ("int8", "int8_g128"):
        return _joined([_quantize8_symmetric(rows, GROUPS[form]) for rows in parts])
    return _joined([_quantize_rows(rows, GROUPS[form], VALUES[form], integers=False) for rows in parts])


def _joined(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate rows."""
    minima = [part.minima for part in parts if part.minima is not None]
    return parts[0]._replace(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        minima=torch.cat(minima) if minima else None,
    )


class _Groups(NamedTuple):
    """A weight in groups of inputs; the last group may be shorter."""

    x: torch.Tensor
    """float32 [num_outputs, groups, size], with zeros after the end."""
    counts: torch.Tensor
    """Number of inputs of each group, float32 [groups, 1]."""
    is_there: torch.Tensor
    """bool [groups, size]."""
    num_inputs: int

    @classmethod
    def of(cls, weight: torch.Tensor, size: int) -> "_Groups":
        num_inputs, missing = weight.shape[1], -weight.shape[1] % size
        x = torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, size))
        is_there = (torch.arange(num_inputs + missing, device=weight.device) < num_inputs).view(-1, size)
        return cls(x, is_there.sum(1, keepdim=True).float(), is_there, num_inputs)

    def least(self) -> torch.Tensor:
        """Minimum of each group: [num_outputs, groups, 1]."""
        return torch.where(self.is_there, self.x, torch.inf).amin(2, keepdim=True)

    def most(self) -> torch.Tensor:
        """Maximum of each group: [num_outputs, groups, 1]."""
        return torch.where(self.is_there, self.x, -torch.inf).amax(2, keepdim=True)


def _quantize_rows(weight: torch.Tensor, size: int, values: torch.Tensor, *, integers: bool) -> GroupedWeight:
    """`values`: UINT4 or UINT5."""
    groups, most = _Groups.of(weight, size), len(values) - 1
    found = _search_line(groups, most)
    if integers:
        scales, minima = _near_integers(groups, most, *(_as_integers(each, size) for each in found))
    else:
        scales, minima = (each.to(torch.bfloat16).float() for each in found)
    return _encoded(groups, values.to(weight.device), scales, minima)


def _quantize8_rows(weight: torch.Tensor, size: int) -> GroupedWeight:
    """Divide the range of each group into 255 steps. Rounding of the stored scale and minimum never narrows the
    range."""
    groups = _Groups.of(weight, size)
    minima = _float16_above(-groups.least())
    scales = _float16_above((groups.most() + minima).clamp(min=0) / 255)
    return _encoded(groups, UINT8.to(weight.device), scales, minima)


def _float16_above(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest float16 numbers that are not less."""
    nearest = numbers.half().float()
    return torch.where(nearest < numbers, (numbers + numbers.abs() * 2**-10 + 2**-24).half().float(), nearest)


def _encoded(groups: _Groups, values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> GroupedWeight:
    """The nearest codes. scales and minima: [num_outputs, groups, 1]."""
    most = len(values) - 1
    inverse = torch.where(scales > 0, 1 / scales, 0)
    codes = (((groups.x + minima) * inverse).clamp(0, most) + 0.5).to(torch.uint8).flatten(1)
    size = groups.x.shape[2]
    return GroupedWeight(codes[:, : groups.num_inputs].contiguous(), values, scales[..., 0], size, minima[..., 0])


def _search_line(groups: _Groups, most_code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find scales and minima, [num_outputs, groups, 1] each, with the least squared error for codes up to `most_code`.
    Each candidate of STEPS4 gives codes, to which a line is fitted; the codes of this line give a second one."""
    least, most = groups.least(), groups.most()
    x = torch.where(groups.is_there, groups.x - least, 0)
    total, width = x.sum(2, keepdim=True), most - least
    best, scales, starts = torch.zeros_like(total), torch.zeros_like(total), torch.zeros_like(total)
    for steps in STEPS4:
        start, inverse = torch.zeros_like(total), torch.where(width > 0, steps * (most_code / 15) / width, 0)
        for _ in range(2):
            codes = torch.where(groups.is_there, ((x - start) * inverse).round().clamp(0, most_code), 0)
            ones, squares = codes.sum(2, keepdim=True), codes.square().sum(2, keepdim=True)
            products = (codes * x).sum(2, keepdim=True)
            spread = groups.counts * squares - ones * ones
            scale = torch.where(spread > 0, (groups.counts * products - ones * total) / spread, 0)
            start = (total - scale * ones) / groups.counts
            gain, inverse = scale * products + start * total, torch.where(scale > 0, 1 / scale, 0)
        better = (gain > best) & (width > 0)
        best, scales, starts = (
            torch.where(better, new, old) for new, old in ((gain, best), (scale, scales), (start, starts))
        )
    return scales, _where_finite(width, -(least + starts))


def _where_finite(sizes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Set the scales or minima of groups with numbers that are not finite to NaN, because codes cannot show these."""
    return torch.where(sizes.isfinite(), numbers, torch.nan)


class _Integers(NamedTuple):
    """Scales or minima of small groups in the form in which they are stored: integers up to 127 times a number that
    SUPER_INPUTS inputs share."""

    whole: torch.Tensor
    """The integers, [num_outputs, groups, 1]."""
    units: torch.Tensor
    """The shared numbers, [num_outputs, groups, 1]."""


def _as_integers(numbers: torch.Tensor, size: int) -> _Integers:
    num_groups, at_once = numbers.shape[1], SUPER_INPUTS // size
    shared = torch.nn.functional.pad(numbers, (0, 0, 0, -num_groups % at_once)).unflatten(1, (-1, at_once))
    supers = shared.abs().amax(2, keepdim=True) / 127
    whole = (shared * torch.where(supers > 0, 1 / supers, 0)).round()
    parts = (each.flatten(1, 2)[:, :num_groups] for each in (whole, supers.expand_as(whole)))
    return _Integers(*parts)


NEAR = ((0, 0), *((scale, minimum) for scale in range(-2, 3) for minimum in (-1, 0, 1)))
"""Changes to the integers of scale and minimum that are tried. The change of the minimum is in addition to the one that
keeps the middle of the group in place; kNear."""


def _near_integers(
    groups: _Groups, most_code: int, scales: _Integers, minima: _Integers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, [num_outputs, groups, 1] each, with the least squared error of those in NEAR."""
    step = most_code / 2 * scales.units / minima.units
    best = torch.full_like(step, torch.inf)
    chosen, start = scales.whole * scales.units, minima.whole * minima.units
    for scale, minimum in NEAR:
        sizes = (scales.whole + scale).clamp(0, 127) * scales.units
        starts = (minima.whole + (scale * step).round() + minimum).clamp(-127, 127) * minima.units
        inverse = torch.where(sizes > 0, 1 / sizes, 0)
        made = ((groups.x + starts) * inverse).round().clamp(0, most_code) * sizes - starts
        error = torch.where(groups.is_there, made - groups.x, 0).square().sum(2, keepdim=True)
        better = error < best
        best, chosen, start = (
            torch.where(better, new, old) for new, old in ((error, best), (sizes, chosen), (starts, start))
        )
    return chosen, start


def _quantize8_symmetric(weight: torch.Tensor, size: int) -> GroupedWeight:
    """Quantize to symmetric 8-bit codes. Of the candidates, each group gets the scale with the least squared error."""
    groups = _Groups.of(weight, size).x
    largest = groups.abs().amax(2, keepdim=True)
    best, scales = torch.zeros_like(largest), torch.zeros_like(largest)
    for steps in STEPS8:
        integers = (groups * torch.where(largest > 0, steps / largest, 0)).round().clamp(-127, 127)
        products, squares = (groups * integers).sum(2, keepdim=True), integers.square().sum(2, keepdim=True)
        better = products * products > best * squares
        best = torch.where(better, products * products / squares, best)
        scales = torch.where(better, products / squares, scales)
    scales = _where_finite(largest, scales.to(torch.bfloat16).float())
    codes = (groups * torch.where(scales > 0, 1 / scales, 0)).round().clamp(-128, 127) + 128
    flat = codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return GroupedWeight(flat, INT8.to(weight.device), scales[..., 0], size)


ENDS = (-9, -8.75, -8.5, -8.25, -8, -7.75, -7.5, -7.25, -7, -6.75, 6.5, 6.75, 7, 7.25, 7.5, 8)
"""Candidates in the search for a symmetric scale: the value that the weight of largest magnitude in a group becomes;
kEnds4 in csrc/cpu/isa/quantize.cpp."""


def quantize4(weight: torch.Tensor, group_size: int) -> GroupedWeight:
    """Quantize a weight, float [num_outputs, num_inputs], to symmetric integers of 4 bits, rounded to nearest with the
    scale of least squared error of the candidates in ENDS. Scales are bfloat16 numbers and may be negative. Formats of
    checkpoints use this form; `quantize` has minima as well."""
    num_inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight.float(), (0, -num_inputs % group_size)).unflatten(1, (-1, group_size))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, scales = torch.zeros_like(largest), torch.zeros_like(largest)
    for end in ENDS:
        integers = (groups * torch.where(largest != 0, end / largest, 0)).round().clamp(-8, 7)
        product = (groups * integers).sum(2, keepdim=True)
        square = (integers * integers).sum(2, keepdim=True)
        better = product * product > best * square
        best = torch.where(better, product * product / square, best)
        scales = torch.where(better, product / square, scales)
    scales = _where_finite(largest, scales.to(torch.bfloat16).float())
    inverse = torch.where(scales != 0, 1 / scales, 0)
    codes = ((groups * inverse).round().clamp(-8, 7) + 8).to(torch.uint8)
    return GroupedWeight(codes.flatten(1)[:, :num_inputs], INT4, scales[..., 0], group_size)


_ROWS_AT_A_TIME = 4096


def quantize_fp8(weight: torch.Tensor) -> GroupedWeight:
    """Quantize a weight, float [num_outputs, num_inputs], to floats of 8 bits (E4M3) of at most 448. Scales are
    bfloat16 numbers: each group gets the scale of least squared error of 16 candidates from the smallest possible one
    to almost twice that."""
    parts = [_quantize_fp8_rows(rows) for rows in weight.split(_ROWS_AT_A_TIME)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return GroupedWeight(codes, E4M3.to(weight.device), scales, GROUPS["fp8"])


def _quantize_fp8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight.float(), (0, -num_inputs % GROUPS["fp8"])).unflatten(1, (-1, GROUPS["fp8"]))
    least = groups.abs().amax(2, keepdim=True) / 448
    scales, best = least.to(torch.bfloat16).float(), torch.full_like(least, torch.inf)
    for steps in range(16):
        tried = (least * (1 + steps / 16)).to(torch.bfloat16).float()
        error = (_as_fp8(groups, tried).float() * tried - groups).square().sum(2, keepdim=True)
        scales, best = torch.where(error < best, tried, scales), torch.minimum(error, best)
    codes = _as_fp8(groups, scales).view(torch.uint8)
    return codes.flatten(1)[:, :num_inputs], scales[..., 0]


def _as_fp8(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0)
    return (groups * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)


def unpack(words: torch.Tensor, bits: int, *, dim: int) -> torch.Tensor:
    """Unpack int32 words of 32 / bits codes each along `dim` (0 or 1), the lowest bits first, to uint8 codes. For
    dimension 0, the result is a transposed view."""
    if dim == 0:
        return unpack(words.t(), bits, dim=1).t()
    data = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return data
    if bits == 4:
        return halves(data)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def halves(data: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Split bytes, uint8 [..., n], into halves, uint8 [..., 2 n], the low half first unless `high_first`."""
    low, high = data & 15, data >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)
