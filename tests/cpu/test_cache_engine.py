"""Block programs move the right bytes: by value, op by op, against an execution that knows nothing of merging."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lite.errors import ProtocolError
from vllm_lite.model_spec import KVGroup, ModelSpec, Rope
from vllm_lite.protocol.step import BlockOp
from vllm_lite.worker import cache_engine
from vllm_lite.worker.cache_engine import CacheEngine

N, M = 7, 5
"""Device blocks [0, 7), host blocks [7, 12)."""
COPY, SWAP_OUT, SWAP_IN = BlockOp.COPY, BlockOp.SWAP_OUT, BlockOp.SWAP_IN


def make_spec(num_layers=3, groups=None):
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        norm_eps=1e-5,
        activation="silu",
        rope=Rope("default", 1e4),
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=False,
        bos_token_id=None,
        eos_token_ids=(),
        dtype="float32",
        kv_groups=groups or (KVGroup("full", tuple(range(num_layers))),),
    )


def make_engine(num_blocks=N, num_host_blocks=M, **options):
    return CacheEngine(make_spec(**options), 2, num_blocks, num_host_blocks, torch.float32, torch.device("cpu"))


def numbered_engine():
    """Every element of every block is the block's global id."""
    engine = make_engine()
    engine.pool.copy_(torch.arange(N)[:, None, None, None, None, None].expand_as(engine.pool))
    engine.host_pool.copy_(torch.arange(N, N + M)[:, None, None, None, None, None].expand_as(engine.host_pool))
    return engine


def contents(engine):
    """What each global id holds; a block torn by a partial copy is an error."""
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
    """Consecutive ids, as the engine sends them when it swaps a whole sequence: what merging is for."""
    op, src, dst = draw(any_op)
    length = draw(st.integers(1, 5))
    sources = range(N, N + M) if op == SWAP_IN else range(N)
    destinations = range(N, N + M) if op == SWAP_OUT else range(N)
    ids = [(op, src + i, dst + i) for i in range(length)]
    return [entry for entry in ids if entry[1] in sources and entry[2] in destinations]


@settings(max_examples=400, deadline=None)
@given(st.lists(runs(), max_size=8).map(lambda parts: [entry for part in parts for entry in part]))
def test_any_program_gives_what_one_op_at_a_time_gives(program):
    engine = numbered_engine()
    engine.execute(program)
    assert contents(engine) == one_at_a_time(program)


@pytest.mark.parametrize(
    "program",
    [
        [(COPY, 1, 2), (COPY, 2, 3), (COPY, 3, 4)],  # a chain carries 1 all the way
        [(COPY, 3, 2), (COPY, 2, 1), (COPY, 1, 4)],
        [(COPY, 1, 3), (COPY, 2, 4), (COPY, 3, 5), (COPY, 4, 6)],  # overlaps from the third on
        [(COPY, 3, 1), (COPY, 4, 2), (COPY, 5, 3), (COPY, 6, 4)],  # later ones overwrite what earlier ones read
        [(SWAP_OUT, 1, 7), (COPY, 2, 1), (SWAP_IN, 7, 2)],  # exchange of 1 and 2 through the host
        [(SWAP_OUT, 1, 7), (SWAP_OUT, 2, 7), (SWAP_IN, 7, 3)],  # the later write to 7 counts
        [(COPY, 1, 1)],
        [],
    ],
)
def test_programs_whose_order_matters(program):
    engine = numbered_engine()
    engine.execute(program)
    assert contents(engine) == one_at_a_time(program)


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


def test_consecutive_ids_move_in_one_copy():
    swap = [(SWAP_OUT, src, src + 6) for src in range(1, 6)]
    apart = [(COPY, 1, 4), (COPY, 2, 5), (COPY, 3, 6)]
    engine = make_engine()
    for program, expected in ((swap, [(SWAP_OUT, 1, 0, 5)]), (apart, [(COPY, 1, 4, 3)])):
        checked = [engine._check(i, *entry) for i, entry in enumerate(program)]
        assert list(cache_engine._merge(checked)) == expected


def test_layers_see_their_part_of_every_block():
    engine = make_engine()
    views = engine.layer_views()
    assert len(views) == 3
    for layer, view in enumerate(views):
        assert view.shape == (N, 2, 2, 2, 4)
        view.fill_(layer + 1)
    assert torch.equal(engine.pool[3].flatten(1)[:, 0], torch.tensor([1.0, 2.0, 3.0]))
    assert engine.pool.is_contiguous()


def test_block_bytes_are_those_the_spec_promises():
    engine = make_engine()
    assert engine.pool[0].nbytes == engine.spec.kv_block_bytes(block_size=2, dtype_bytes=4)


def test_groups_share_the_places_in_a_block():
    groups = (KVGroup("full", (0, 2)), KVGroup("full", (1, 3)))
    engine = make_engine(num_layers=4, groups=groups)
    assert engine.pool.shape[1] == 2
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


def test_measuring_the_swap_takes_a_moment_and_leaves_the_pools_as_they_were():
    engine = make_engine()
    started_s = time.perf_counter()
    assert engine.measure_swap() > 100
    assert time.perf_counter() - started_s < 1  # 0.01 s on an idle machine
    assert not engine.pool.any()
    assert not engine.host_pool.any()


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(N, 0), (1, M)])
def test_without_blocks_to_swap_there_is_no_rate(num_blocks, num_host_blocks):
    assert make_engine(num_blocks, num_host_blocks).measure_swap() == 0
