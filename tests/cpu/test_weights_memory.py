"""Loading packs one weight after another, whatever the files look like, and keeps nothing that it was lent."""

import json
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.checkpoints import load_and_see, make_checkpoint
from tests.thread_group import ThreadGroup
from vllm_lite.checkpoint.config_json import load_spec
from vllm_lite.checkpoint.quantization.on_load import Quantization
from vllm_lite.checkpoint.shard import Shard
from vllm_lite.checkpoint.tensors.headers import INDEX_FILE, SINGLE_FILE, read_headers
from vllm_lite.checkpoint.tensors.weight_bytes import Checkpoint, weights_bytes
from vllm_lite.kernels import cpu
from vllm_lite.kernels.cpu import memory
from vllm_lite.kernels.cpu.pages import HUGE_PAGE_BYTES
from vllm_lite.kernels.cpu.weights.linear import PackedWeight
from vllm_lite.layers.parts import Parts
from vllm_lite.layers.weights.weight_form import DenseForm
from vllm_lite.layers.weights.weight_slot import WeightGroup, WeightSlot, WeightStack
from vllm_lite.models import weights
from vllm_lite.models.llama import Llama
from vllm_lite.models.weights import load_weights
from vllm_lite.parallel.communicator import Communicator, SingleRank

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not cpu.available(), reason="no native library")


def make_model(
    path: Path,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    device: torch.device = CPU,
    communicator: Communicator | None = None,
) -> Any:
    form = DenseForm(quantization)
    ranks = communicator or SingleRank(device)
    parts = Parts(load_spec(path), dtype, device, ranks, form=form, head_quantization=quantization)
    return Llama(parts, max_model_len=64, max_num_tokens=8)


def reorder(path: Path, num_shards: int) -> None:
    """Deal a checkpoint's tensors out to shards, and let their data lie in the opposite order of their names."""
    tensors = load_file(path / SINGLE_FILE)
    (path / SINGLE_FILE).unlink()
    files = {name: f"model-{number % num_shards}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        header, data = {}, b""
        for name in sorted((name for name in tensors if files[name] == file), reverse=True):
            one = save({name: tensors[name]})
            size = int.from_bytes(one[:8], "little")
            body = one[8 + size :]
            header[name] = json.loads(one[8 : 8 + size])[name] | {"data_offsets": [len(data), len(data) + len(body)]}
            data += body
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_order_and_shards_change_nothing(tmp_path: Path, dtype: torch.dtype, stored: str, tied: bool) -> None:
    path = make_checkpoint(tmp_path, dtype=stored, tie_word_embeddings=tied, attention_bias=True)
    tensors = load_file(path / SINGLE_FILE)
    before = load_and_see(make_model(path, dtype), path)
    reorder(path, num_shards=3)
    after = load_and_see(make_model(path, dtype), path)
    assert before.keys() == after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(before[name], tensor.to(dtype)), name
        assert torch.equal(after[name], before[name]), name


class Live:
    """Bytes of the tensors that `make` has made and that somebody still has, and the most there were at once."""

    def __init__(self) -> None:
        self.num_bytes = self.most = 0

    def watch(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object) -> torch.Tensor:
            tensor = make(*args)
            self.num_bytes += tensor.nbytes
            self.most = max(self.most, self.num_bytes)
            weakref.finalize(tensor, self.forget, tensor.nbytes)
            return tensor

        return made

    def forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization | None
) -> None:
    peaks = []
    for num_layers in (2, 8):
        path = make_checkpoint(tmp_path / str(num_layers), dtype="bfloat16", num_hidden_layers=num_layers)
        live, model = (
            Live(),
            make_model(path, torch.float32, quantization),
        )  # other than what is stored: every tensor is converted
        with monkeypatch.context() as patch:
            patch.setattr(memory, "zeros", live.watch(memory.zeros))
            patch.setattr(WeightStack, "empty", live.watch(WeightStack.empty))
            load_weights(model, path)
        kept = sum(norm.weight.nbytes for layer in model.layers for norm in (layer.input_norm, layer.mlp_norm))
        kept += model.norm.weight.nbytes + model.embedding.weight.nbytes
        assert live.num_bytes == kept
        peaks.append(live.most - kept)
    assert (
        0 < peaks[0] <= 2 * 384 * 64 * 4
    )  # the LM head is the largest, and the smaller buffer before it has just been freed
    assert peaks[1] == peaks[0]


@needs_native
def test_tensors_lent_by_the_reader_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and buffers are something else when a layer has taken its weight: here they are wiped."""
    path = make_checkpoint(tmp_path, attention_bias=True)
    groups = Llama.weight_groups
    wiped = []

    def wiping(model: Llama) -> Iterator[WeightGroup]:
        for group in groups(model):

            def take(*tensors: torch.Tensor, group: WeightGroup = group) -> None:
                group.take(*tensors)
                for stack, tensor in zip(group.stacks, tensors, strict=True):
                    if stack.lent:
                        wiped.append(stack.slots[0].name)
                        tensor.zero_()

            yield group._replace(take=take)

    x, outputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), []
    for _ in range(2):
        model = make_model(path, torch.float32)
        load_weights(model, path)
        out = torch.empty(2, sum(rows.size for rows in model.layers[1].attention.qkv.shape.outputs))
        model.layers[1].attention.qkv.forward(x, out)
        outputs.append((out, model.logits(x)))
        monkeypatch.setattr(Llama, "weight_groups", wiping)
    assert len(wiped) == 2 * 4 + 1
    for plain, other in zip(*outputs, strict=True):
        assert torch.equal(plain, other)


def resident_bytes(file: Path) -> int:
    """Count the resident bytes of the mappings of `file` in this process."""
    entries = Path("/proc/self/smaps").read_text().split("VmFlags")
    found = [entry for entry in entries if str(file) in entry]
    return sum(int(entry.split("\nRss:")[1].split()[0]) * 1024 for entry in found)


def test_pages_of_a_file_are_given_back_and_come_again(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    count = 1 << 20
    values = torch.arange(count, dtype=torch.int32)
    file.write_bytes(values.numpy().tobytes())
    mapped = torch.from_file(str(file), shared=False, size=count, dtype=torch.int32)
    assert torch.equal(mapped, values)
    assert resident_bytes(file) == 4 * count
    memory.give_back(mapped[1000 : count - 1000])
    assert resident_bytes(file) <= 16 * 1024
    assert torch.equal(mapped, values)
    for part in (mapped[:0], mapped[5:10]):  # no whole page
        memory.give_back(part)
    assert resident_bytes(file) == 4 * count
    columns = mapped.view(1024, 1024)[:, :3]
    memory.give_back(columns)
    assert resident_bytes(file) <= 8 * 1024
    assert torch.equal(mapped, values)


def test_a_checkpoint_is_given_back_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path)
    given_back = []
    monkeypatch.setattr(memory, "give_back", lambda part: given_back.append(part.numel()))
    loaded = load_and_see(make_model(path, torch.float32), path)
    assert len(given_back) == len(loaded) - 1  # the last goes with the mapping
    load_and_see(make_model(path, torch.float32), path, load_format="dummy")
    assert len(given_back) == len(loaded) - 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_another_device_is_given_tensors_of_its_own(
    tmp_path: Path, quantization: Quantization | None, tied: bool
) -> None:
    path = make_checkpoint(tmp_path, tie_word_embeddings=tied, attention_bias=True)
    device = torch.device("meta")
    model = make_model(path, torch.bfloat16, quantization, device)
    assert not any(stack.lent for group in model.weight_groups() for stack in group.stacks)
    load_weights(model, path)
    made = [model.lm_head.matmul]
    for layer in model.layers:
        linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
        made += [linear.matmul for linear in linears]
    kept = [part for matmul in made for part in vars(matmul).values() if torch.is_tensor(part)]
    assert kept
    assert {part.device for part in (*kept, model.embedding.weight, model.norm.weight)} == {device}


# ---- a rank's part

PAGE = 4096
MAPPED_AROUND = 4 << 20
"""The system maps pages around the one that is touched, and whole folios of its cache."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors have many pages."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    options: dict[str, Any] = sizes | {"head_dim": 64, "vocab_size": 2048, "num_hidden_layers": 2}
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", dtype="bfloat16", **options)


def test_a_rank_reads_its_boxes(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank touches only the pages of its rows in a file, or, of weights split by inputs, of its piece of each row."""
    tensors = load_file(large / SINGLE_FILE)
    vectors = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() == 1)
    matrices = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() == 2)
    by_inputs = sum(tensor.nbytes for name, tensor in tensors.items() if "o_proj" in name or "down_proj" in name)
    read = weights.Files.read
    boxes: list[int] = []
    pages: set[int] = set()

    def seen(files: weights.Files, slot: WeightSlot) -> torch.Tensor:
        box = read(files, slot)
        boxes.append(box.nbytes)
        rows = box if box.dim() == 2 else box[None]
        first = box.data_ptr() + torch.arange(len(rows)) * rows.stride(0) * 2
        last = first + rows.shape[1] * 2 - 1
        for one, other in zip((first // PAGE).tolist(), (last // PAGE).tolist(), strict=True):
            pages.update(range(one, other + 1))
        return box

    monkeypatch.setattr(weights.Files, "read", seen)
    for communicator in ThreadGroup(2).communicators:
        boxes.clear()
        pages.clear()
        load_weights(make_model(large, torch.bfloat16, communicator=communicator), large)
        assert sum(boxes) == matrices // 2 + vectors
        assert sum(boxes) <= PAGE * len(pages) <= sum(boxes) + by_inputs // 2 + 2 * PAGE * len(tensors)


def test_pages_that_a_rank_has_read_are_released(large: Path) -> None:
    """With the pages around its boxes, which the system maps as well."""
    file, most = large / SINGLE_FILE, 0
    largest = max(tensor.nbytes for tensor in load_file(file).values())

    def seen(done: int, total: int) -> None:
        nonlocal most
        most = max(most, resident_bytes(file))

    for communicator in ThreadGroup(2).communicators:
        load_weights(make_model(large, torch.bfloat16, communicator=communicator), large, progress=seen)
    assert most <= largest + MAPPED_AROUND


@needs_native
def test_a_rank_never_holds_more_than_its_part(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, zeros = Checkpoint(load_spec(large), read_headers(large)), memory.zeros
    for world in (1, 2, 4):
        live = Live()
        model = make_model(large, torch.bfloat16, communicator=ThreadGroup(world).communicators[0])
        largest = max(math.prod(stack.shape) for group in model.weight_groups() for stack in group.stacks)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "zeros", live.watch(zeros))
            patch.setattr("vllm_lite.kernels.cpu.weights.linear.weight_zeros", live.watch(zeros))
            patch.setattr(WeightStack, "empty", live.watch(WeightStack.empty))
            load_weights(model, large)
        assert live.num_bytes == weights_bytes(checkpoint, 2, shard=Shard(0, world))
        assert live.most <= live.num_bytes + 2 * largest, "beside the weights there is the one that is being packed"


def test_small_weights_share_an_allocation() -> None:
    """Zeros of their own, aligned, on shared pages, which last as long as any of them and no longer."""
    shared = memory._Stretch()
    parts = [shared.take(num_bytes) for num_bytes in (1, 64, 1000, 5 << 20)]
    for number, part in enumerate(parts, start=1):
        assert part.data_ptr() % 64 == 0
        assert not part.any()
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == [[1], [2], [3], [4]]
    starts = [part.data_ptr() - parts[0].data_ptr() for part in parts]
    assert starts == [0, 64, 128, 128 + 1024]
    assert parts[0].data_ptr() % HUGE_PAGE_BYTES == 0
    pages = shared._pages
    assert pages is not None
    other = shared.take(12 << 20)  # more than what is left
    assert shared._pages is not pages
    del parts[1:], part
    assert pages() is not None
    parts.clear()
    assert pages() is None
    other.fill_(1)


@needs_native
def test_weights_are_made_on_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_stretch", memory._Stretch())
    weights = [PackedWeight(torch.randn(64, 64)) for _ in range(2)]
    first, second = (weight._tensors[0].data_ptr() for weight in weights)
    assert second - first == 64 * 64 * 4
