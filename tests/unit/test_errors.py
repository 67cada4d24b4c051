"""Errors cross the borders of a user's processes: a pool pickles what its children raise."""

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from vllm_lite import errors
from vllm_lite.errors import ContextLengthError, GrammarError, PooledLengthError, VllmLiteError

RAISED: list[VllmLiteError] = [
    ContextLengthError(10, 20, 3),
    PooledLengthError(10, 20, "text 3: "),
    PooledLengthError(10, None, may_cut=False),
    GrammarError("the grammar is wrong"),
]


def kinds(kind: type[VllmLiteError]) -> set[type[VllmLiteError]]:
    return {kind}.union(*map(kinds, kind.__subclasses__()))


def fail(number: int) -> None:
    raise RAISED[number]


@pytest.mark.parametrize("error", RAISED, ids=[type(error).__name__ for error in RAISED])
def test_copies_are_like_the_error(error: VllmLiteError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert again.args == error.args == (str(again),)


def test_copies_keep_notes() -> None:
    error = ContextLengthError(10, 20, 3)
    error.add_note("of the third prompt")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert again.__notes__ == ["of the third prompt"]


def test_every_error_that_takes_more_than_a_message_is_among_them() -> None:
    own = {kind for kind in kinds(VllmLiteError) if kind.__module__ == errors.__name__ and "__init__" in vars(kind)}
    assert own <= {type(error) for error in RAISED}


def test_a_pool_raises_what_its_child_raised() -> None:
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool, pytest.raises(PooledLengthError, match="text 3"):
        pool.submit(fail, 1).result(60)
