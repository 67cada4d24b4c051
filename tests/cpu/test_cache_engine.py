"""Block programs move the right bytes: by value, op by op, against an execution that knows nothing of stages."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.kernels import emulator
from vllm_lite.checkpoint.layer_specs.delta_net import DeltaNetSpec
from vllm_lite.checkpoint.layer_specs.rope import Rope
from vllm_lite.checkpoint.model_spec import AttentionSpec, LayerGroup, LayerSpec, ModelSpec, NormSpec
from vllm_lite.errors import ConfigError, ProtocolError
from vllm_lite.kernels import cpu
from vllm_lite.protocol.step import BlockOp
from vllm_lite.worker.memory import cache_engine
from vllm_lite.worker.memory.block_mover import BlockRun, CudaMover, NativeMover, Pools, TorchMover, stages
from vllm_lite.worker.memory.cache_engine import CacheEngine

N, M = 7, 5
"""Device blocks [0, 7), host blocks [7, 12)."""
COPY, SWAP_OUT, SWAP_IN = BlockOp.COPY, BlockOp.SWAP_OUT, BlockOp.SWAP_IN
STATE_OUT, STATE_IN = BlockOp.STATE_OUT, BlockOp.STATE_IN


HEADS = AttentionSpec(4, 2, 4, scale=0.5)


def make_spec(num_layers=3, groups=None):
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        layers=(LayerSpec(HEADS, Rope(1e4)),) * num_layers,
        norm=NormSpec(1e-5),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(),
        dtype="float32",
        kv_groups=groups or (LayerGroup(tuple(range(num_layers)), HEADS),),
    )


def make_engine(num_blocks=N, num_host_blocks=M, dtype=torch.float32, block_size=2, **options):
    return CacheEngine(make_spec(**options), block_size, num_blocks, num_host_blocks, dtype, torch.device("cpu"))


class FakeStream:
    """Knows which work runs before it, as events of a GPU order it."""

    def __init__(self, behind=()):
        self.behind = set(behind)

    def wait_stream(self, stream):
        self.behind |= stream.behind


class FakeStreams:
    def __init__(self):
        self.forward = FakeStream(["the forward pass before"])
        self.streams_of = {SWAP_OUT: FakeStream(), SWAP_IN: FakeStream()}
        self.active = self.forward

    def current(self):
        return self.forward

    def of_op(self, op):
        return self.streams_of[op]

    @contextmanager
    def use(self, stream):
        before, self.active = self.active, stream
        yield
        self.active = before


class TracedMover(CudaMover):
    """Records every op and the ops that run before it: (op, src, dst), and the set of their indices in `trace`."""

    def __init__(self, pools):
        self.streams = FakeStreams()
        self.trace = []
        traced = TracedPools(*pools)
        traced.mover = self
        super().__init__(traced, self.streams, None)

    def record(self, runs):
        stream = self.streams.active
        behind = set(stream.behind)
        for run in runs:
            for i in range(run.length):
                stream.behind.add(len(self.trace))
                self.trace.append(((run.op, run.src + i, run.dst + i), behind))


class TracedPools(Pools):
    mover: TracedMover

    def copy(self, runs):
        self.mover.record(runs)
        super().copy(runs)


def on_emulator(pools):
    if emulator.available() is None:
        pytest.skip("no C++ compiler for the emulator")
    return CudaMover(pools, FakeStreams(), emulator.EmulatorLauncher())


def native(pools):
    if not cpu.available():
        pytest.skip("no native library")
    return NativeMover(pools)


MOVERS = {"torch": TorchMover, "native": native, "cuda": on_emulator, "cuda, no kernels": TracedMover}


def with_mover(engine, mover):
    engine.mover = MOVERS[mover](Pools(engine.pool, engine.host_pool))
    return engine


def numbered_engine(mover="torch"):
    """Every element of every block is the block's global id."""
    engine = with_mover(make_engine(), mover)
    engine.pool.copy_(torch.arange(N)[:, None].expand_as(engine.pool))
    engine.host_pool.copy_(torch.arange(N, N + M)[:, None].expand_as(engine.host_pool))
    return engine


def contents(engine):
    """Read the content of each global id; a block torn by a partial copy is an error."""
    blocks = torch.cat((engine.pool, engine.host_pool)).flatten(1)
    assert torch.equal(blocks, blocks[:, :1].expand_as(blocks))
    return [int(value) for value in blocks[:, 0]]


def one_at_a_time(program):
    held = list(range(N + M))
    for _, src, dst in program:
        held[dst] = held[src]
    return held


device, host, written = st.integers(0, N - 1), st.integers(N, N + M - 1), st.integers(1, N - 1)
any_op = st.one_of(
    st.tuples(st.just(COPY), device, written),
    st.tuples(st.just(SWAP_OUT), device, host),
    st.tuples(st.just(SWAP_IN), host, written),
)


@st.composite
def runs(draw):
    """Consecutive ids, as the engine sends them when it swaps a whole sequence; merging is made for these."""
    op, src, dst = draw(any_op)
    length = draw(st.integers(1, 5))
    sources = range(N, N + M) if op == SWAP_IN else range(N)
    destinations = range(N, N + M) if op == SWAP_OUT else range(N)
    ids = [(op, src + i, dst + i) for i in range(length)]
    return [entry for entry in ids if entry[1] in sources and entry[2] in destinations]


programs = st.lists(runs(), max_size=8).map(lambda parts: [entry for part in parts for entry in part])


@pytest.mark.parametrize("mover", MOVERS)
def test_any_program_equals_its_ops_one_at_a_time(mover):
    engine = numbered_engine(mover)
    values = torch.cat((engine.pool, engine.host_pool))

    @settings(max_examples=examples(250))
    @given(programs)
    def check(program):
        engine.pool.copy_(values[:N])
        engine.host_pool.copy_(values[N:])
        engine.execute(program)
        assert contents(engine) == one_at_a_time(program)

    check()


ORDERED = [
    [(COPY, 1, 2), (COPY, 2, 3), (COPY, 3, 4)],  # a chain carries 1 all the way
    [(COPY, 3, 2), (COPY, 2, 1), (COPY, 1, 4)],
    [(COPY, 1, 3), (COPY, 2, 4), (COPY, 3, 5), (COPY, 4, 6)],  # overlaps from the third on
    [(COPY, 3, 1), (COPY, 4, 2), (COPY, 5, 3), (COPY, 6, 4)],  # later ops overwrite blocks that earlier ones read
    [(SWAP_OUT, 1, 7), (COPY, 2, 1), (SWAP_IN, 7, 2)],  # exchange of 1 and 2 through the host
    [(SWAP_OUT, 1, 7), (SWAP_OUT, 2, 7), (SWAP_IN, 7, 3)],  # the later write to 7 counts
    [(SWAP_IN, 7, 1), (SWAP_OUT, 1, 8), (SWAP_IN, 8, 2), (SWAP_OUT, 2, 9)],
    [(COPY, 1, 1)],
    [],
]


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("program", ORDERED)
def test_programs_that_depend_on_their_order(program, mover):
    engine = numbered_engine(mover)
    engine.execute(program)
    assert contents(engine) == one_at_a_time(program)


def blocks_of(entry):
    """The block that an op reads and the one that it writes, both as (tier, block)."""
    op, src, dst = entry
    return ("host" if op == SWAP_IN else "device", src), ("host" if op == SWAP_OUT else "device", dst)


@settings(max_examples=examples(250))
@given(programs)
def test_on_a_gpu_every_op_waits_for_those_it_must_not_overtake(program):
    engine = with_mover(make_engine(), "cuda, no kernels")
    engine.execute(program)
    trace, forward = engine.mover.trace, engine.mover.streams.forward
    assert forward.behind == {"the forward pass before", *range(len(trace))}
    expected = [engine.check(0, *entry)[:3] for entry in program]
    expected = [entry for entry in expected if len(set(blocks_of(entry))) == 2]
    assert sorted(entry for entry, _ in trace) == sorted(expected)
    # Equal ops write the same block, so they are traced in the program's order: find each one's place in the trace.
    places: dict[tuple[int, int, int], list[int]] = {}
    for place, (entry, _) in enumerate(trace):
        places.setdefault(entry, []).append(place)
    placed = [(places[entry].pop(0), *blocks_of(entry)) for entry in expected]
    for later, (place, source, destination) in enumerate(placed):
        assert "the forward pass before" in trace[place][1]
        for earlier_place, earlier_source, earlier_destination in placed[:later]:
            if earlier_destination in (source, destination) or earlier_source == destination:
                assert earlier_place in trace[place][1]


def test_swaps_of_both_directions_and_copies_run_at_once():
    engine = with_mover(make_engine(), "cuda, no kernels")
    engine.execute([(SWAP_OUT, 1, 7), (SWAP_IN, 8, 2), (COPY, 3, 4)])
    assert [behind for _, behind in engine.mover.trace] == [{"the forward pass before"}] * 3


def test_round_trip_of_random_bytes_through_the_host():
    engine = make_engine()
    engine.pool.normal_(generator=torch.Generator().manual_seed(0))
    before = engine.pool.clone()
    engine.execute([(SWAP_OUT, 1, 9), (SWAP_OUT, 2, 10), (SWAP_OUT, 5, 7)])
    assert torch.equal(engine.host_pool[[2, 3, 0]], before[[1, 2, 5]])
    engine.pool[1:] = 0
    engine.execute([(SWAP_IN, 7, 1), (SWAP_IN, 9, 3), (SWAP_IN, 10, 4)])
    assert torch.equal(engine.pool[[1, 3, 4]], before[[5, 1, 2]])
    assert torch.equal(engine.pool[0], before[0])
    assert not engine.pool[[2, 5, 6]].any()


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_every_type_of_cache_moves_bit_by_bit(dtype, mover):
    engine = with_mover(make_engine(dtype=dtype), mover)
    assert (engine.pool.dtype, engine.host_pool.dtype) == (dtype, dtype)
    pool, host_pool = engine.pool.view(torch.uint8), engine.host_pool.view(torch.uint8)
    pool.random_(generator=torch.Generator().manual_seed(0))  # NaN of every kind among them
    before = pool.clone()
    engine.execute([(COPY, 2, 6), (SWAP_OUT, 1, 8), (SWAP_OUT, 2, 9), (SWAP_IN, 8, 3)])
    assert torch.equal(host_pool[[1, 2]], before[[1, 2]])
    assert torch.equal(pool, before[[0, 1, 2, 1, 4, 5, 2]])


@pytest.mark.parametrize("mover", MOVERS)
def test_a_pool_of_more_than_2_to_the_31_elements(mover):
    engine = with_mover(make_engine(700, 2, torch.float8_e4m3fn, block_size=2**16), mover)  # touched are a few of them
    pool = engine.pool.view(torch.uint8)
    assert pool.numel() > 2**31
    pool[699].random_(generator=torch.Generator().manual_seed(0))
    engine.execute([(COPY, 699, 698), (SWAP_OUT, 698, 701), (SWAP_IN, 701, 697)])
    assert torch.equal(pool[697], pool[699])
    assert torch.equal(pool[698], pool[699])
    assert not pool[1].any()


def run_lists(program):
    engine = make_engine()
    return stages(engine.check(i, *entry) for i, entry in enumerate(program))


def test_states_move_by_value_beside_blocks_and_in_order():
    delta_net = DeltaNetSpec(1, 2, 4, 4, conv_size=3)
    spec = make_spec()
    layers = (*spec.layers, LayerSpec(HEADS, None, recurrent=delta_net))
    engine = CacheEngine(msgspec.structs.replace(spec, layers=layers), 2, N, M, torch.float32, torch.device("cpu"))
    engine.make_states(4, num_host_states=2)
    engine.states.copy_(torch.randn(engine.states.shape))
    engine.pool.copy_(torch.randn(engine.pool.shape))
    states, pool = engine.states.clone(), engine.pool.clone()
    engine.execute([(STATE_OUT, 3, 5), (SWAP_OUT, 3, 8), (STATE_OUT, 1, 4), (STATE_IN, 5, 1), (STATE_IN, 4, 2)])
    assert torch.equal(engine.states, states[[0, 3, 1, 3]])
    assert torch.equal(engine.pool, pool)
    assert torch.equal(engine.host_pool[1], pool[3])
    assert torch.equal(engine.layer_views()[3], engine.states)
    for entry in [(STATE_OUT, 1, 3), (STATE_IN, 4, 0), (STATE_IN, 6, 1)]:
        with pytest.raises(ProtocolError, match=r"STATE_(OUT|IN)"):
            engine.execute([(STATE_OUT, 2, 5), entry])
    assert torch.equal(engine.host_states, states[[1, 3]]), "nothing has moved"


def test_consecutive_ids_move_in_one_copy():
    assert run_lists([(SWAP_OUT, src, src + 6) for src in range(1, 6)]) == [[BlockRun(SWAP_OUT, 1, 0, 5)]]
    assert run_lists([(COPY, 1, 4), (COPY, 2, 5), (COPY, 3, 6)]) == [[BlockRun(COPY, 1, 4, 3)]]
    assert run_lists([(COPY, 2, 5), (SWAP_IN, 7, 3), (COPY, 1, 4)]) == [
        [BlockRun(COPY, 1, 4, 2), BlockRun(SWAP_IN, 0, 3)]
    ]


def test_a_stage_ends_only_where_results_would_change():
    assert run_lists([(COPY, 1, 2), (COPY, 2, 3), (COPY, 1, 4)]) == [
        [BlockRun(COPY, 1, 2), BlockRun(COPY, 1, 4)],
        [BlockRun(COPY, 2, 3)],
    ]
    assert (
        len(run_lists([(COPY, 1, 2), (COPY, 3, 1)])) == 2
    )  # the second op overwrites the block that the first one reads
    assert len(run_lists([(COPY, 1, 2), (COPY, 3, 2)])) == 2
    assert len(run_lists([(COPY, 1, 2), (SWAP_OUT, 1, 7), (COPY, 1, 3)])) == 1  # three readers of one block
    assert len(run_lists([(SWAP_OUT, 1, 7), (SWAP_IN, 8, 0 + 2)])) == 1  # block 1 of the host is not block 1
    assert run_lists([(COPY, 1, 1)]) == []


def test_layers_see_their_part_of_every_block():
    engine = make_engine()
    views = engine.layer_views()
    assert len(views) == 3
    for layer, view in enumerate(views):
        assert view.shape == (N, 2, 2, 2, 4)
        view.fill_(layer + 1)
    assert torch.equal(engine.pool[3].view(3, -1)[:, 0], torch.tensor([1.0, 2.0, 3.0]))
    assert engine.pool.is_contiguous()


def test_block_bytes_are_those_the_spec_promises():
    engine = make_engine()
    assert engine.pool[0].nbytes == engine.spec.kv_block_bytes(block_size=2, dtype_bytes=4)


def test_scales_of_int8_lie_in_the_block():
    engine = make_engine(dtype=torch.int8)
    assert engine.pool[0].nbytes == engine.spec.kv_block_bytes(block_size=2, dtype_bytes=1, scale_bytes=4)
    assert engine.pool[0].nbytes == 3 * 2 * 2 * 2 * (4 + 4)
    assert [view.shape for view in engine.layer_views()] == [(N, 2, 2, 2, 4 + 4)] * 3


def test_groups_share_the_places_in_a_block():
    groups = (LayerGroup((0, 2), HEADS), LayerGroup((1, 3), HEADS))
    engine = make_engine(num_layers=4, groups=groups)
    assert engine.pool.shape[1] == 2 * 2 * 2 * 2 * 4
    pointers = [view.data_ptr() for view in engine.layer_views()]
    assert pointers[0] == pointers[1] != pointers[2] == pointers[3]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ((COPY, 1, 7), r"op 1: destination 7 of COPY must be in \[1, 7\)"),
        ((COPY, 7, 1), r"source 7 of COPY must be in \[0, 7\)"),
        ((COPY, 1, 0), r"destination 0 of COPY must be in \[1, 7\)"),
        ((SWAP_IN, 7, 0), r"destination 0 of SWAP_IN"),
        ((SWAP_OUT, 1, 6), r"destination 6 of SWAP_OUT must be in \[7, 12\)"),
        ((SWAP_OUT, 1, 12), r"destination 12 of SWAP_OUT must be in \[7, 12\)"),
        ((SWAP_IN, 3, 1), r"source 3 of SWAP_IN must be in \[7, 12\)"),
        ((COPY, -1, 1), r"source -1 of COPY"),
        ((9, 1, 2), r"op 1: 9 is none of 1 COPY, 2 SWAP_OUT, 3 SWAP_IN"),
    ],
)
def test_a_wrong_id_is_an_error_and_nothing_moves(entry, words):
    engine = numbered_engine()
    with pytest.raises(ProtocolError, match=words):
        engine.execute([(COPY, 1, 2), entry])
    assert contents(engine) == list(range(N + M))


def test_the_pool_starts_as_zeros_and_may_have_no_host_tier():
    engine = make_engine(num_host_blocks=0)
    assert not engine.pool.any()
    with pytest.raises(ProtocolError, match="SWAP_OUT"):
        engine.execute([(SWAP_OUT, 1, 7)])


class FakeCudart:
    def __init__(self, code=0):
        self.code = code
        self.locked = {}

    def cudaHostRegister(self, pointer, num_bytes, flags):
        assert flags == 0
        if not self.code:
            self.locked[pointer] = num_bytes
        return self.code

    def cudaHostUnregister(self, pointer):
        del self.locked[pointer]


def test_a_gpu_machine_locks_the_host_pool_as_long_as_the_engine_lives(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    engine = make_engine()
    assert engine.locked(engine.host_pool) is engine.host_pool
    assert cudart.locked == {engine.host_pool.data_ptr(): engine.host_pool.nbytes}
    assert engine.locked(torch.empty(0)).numel() == 0
    assert len(cudart.locked) == 1
    del engine
    assert not cudart.locked


def test_the_error_for_a_host_pool_that_cannot_be_locked_names_swap_space(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(code=2))
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"CUDA error 2.*--swap-space"):
        engine.locked(engine.host_pool)


def test_measuring_the_swap_is_short_and_does_not_change_the_pools(monkeypatch):
    engine = make_engine()
    clock = itertools.count(step=0.001)
    monkeypatch.setattr(cache_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    programs = []
    execute = engine.execute

    def counted(program):
        programs.append(program)
        execute(program)

    monkeypatch.setattr(engine, "execute", counted)
    num_moved = engine.measure_swap() * cache_engine.MEASURING_S
    assert 0 < len(programs) <= cache_engine.MEASURING_S / 0.001 + 1
    assert num_moved == pytest.approx(len(programs[0]) * (len(programs) - 1), rel=0.2)
    assert not engine.pool.any()
    assert not engine.host_pool.any()


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(N, 0), (1, M)])
def test_without_blocks_to_swap_there_is_no_rate(num_blocks, num_host_blocks):
    assert make_engine(num_blocks, num_host_blocks).measure_swap() == 0
