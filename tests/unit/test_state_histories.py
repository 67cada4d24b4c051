"""Saved states that make room: alternating chats find their states again, as do chats that share one."""

from collections.abc import Iterable

import pytest

from vllm_lite.engine.states import histories as state_histories
from vllm_lite.engine.states.histories import History, StateHistories


class Chats:
    """Chats that leave a state after each prompt; `room` states are kept."""

    def __init__(self, room: int) -> None:
        self.histories = StateHistories(room)
        self.room = room
        self.turns: dict[int, int] = {}

    def turn(self, chat: int) -> bool:
        """Whether the chat's next turn finds the state that the one before has left."""
        turn = self.turns.get(chat, 0)
        self.turns[chat] = turn + 1
        key = _key(chat, turn)
        found = key if key in self.histories.kept else None
        history = self.histories.begin(found, () if found else [key])
        self.leave(_key(chat, turn + 1), history)
        return found is not None

    def leave(self, key: bytes, history: History) -> None:
        while len(self.histories.kept) >= self.room:
            worst = self.histories.worst(self.histories.kept, lambda _: True)
            assert worst is not None
            self.histories.remove(self.histories.kept, worst, is_remembered=True)
        self.histories.add(key, history)

    def found(self, turns: Iterable[int]) -> float:
        """The part of these turns that find their states."""
        hits = [self.turn(chat) for chat in turns]
        return sum(hits) / len(hits)


def _key(chat: int, turn: int) -> bytes:
    return b"%d.%d" % (chat, turn)


@pytest.mark.parametrize(("room", "least"), [(32, 1.0), (24, 0.7), (16, 0.45), (8, 0.2)])
def test_chats_that_take_turns_lose_no_more_than_there_is_no_room_for(room: int, least: float) -> None:
    chats = Chats(room)
    chats.found([*range(32)] * 3)
    assert chats.found([*range(32)] * 4) >= least


def test_states_of_quick_chats_are_kept_and_those_of_ended_ones_evicted() -> None:
    chats = Chats(4)
    for other in range(10, 60):
        assert chats.turn(0) == (other > 10)
        chats.turn(other)
    ended = [key for key in chats.histories.kept if key.startswith(b"10.")]
    assert not ended


def test_superseded_states_are_evicted_first() -> None:
    histories = StateHistories(10)
    history, other = histories.begin(None, ()), histories.begin(None, ())
    histories.add(b"other", other)
    for key in (b"a", b"ab", b"abc"):
        histories.add(key, history)
    assert histories.worst(histories.kept, lambda _: True) == b"a"
    assert histories.worst(histories.kept, lambda key: key != b"a") == b"ab"
    assert histories.worst(histories.kept, lambda key: key in (b"abc", b"other"), only_superseded=True) is None


def test_of_a_chat_that_repeats_no_answer_the_state_of_its_prompt_stays() -> None:
    histories = StateHistories(10)

    def turn(found: bytes | None, name: bytes) -> History:
        history = histories.begin(found, ())
        histories.add(name, history, ends_prompt=True)
        histories.add(name + b", answer", history)
        return history

    def order() -> list[bytes]:
        left, going = set(histories.kept), list[bytes]()
        while left:
            worst = histories.worst(histories.kept, left.__contains__)
            assert worst is not None
            going.append(worst)
            left.remove(worst)
        return going

    history = turn(None, b"1")
    assert order() == [b"1", b"1, answer"]
    assert turn(b"1", b"2") is history
    assert order() == [b"1", b"1, answer", b"2, answer", b"2"]
    assert turn(b"2, answer", b"3") is history
    assert order()[-2:] == [b"3", b"3, answer"]
    assert turn(b"1", b"4") is not history, "a second chat begins there"


def test_a_prompt_may_part_from_the_next_one_before_its_last_state() -> None:
    """As with a template that ends a prompt with words that it drops from the next one."""
    histories = StateHistories(10)
    found, history = None, None
    for name in (b"1", b"2", b"3"):
        history, before = histories.begin(found, ()), history
        assert before in (None, history)
        for ending in (b", mark", b", end"):
            histories.add(name + ending, history, ends_prompt=True)
        histories.add(name, history)
        found = name + b", mark"
    assert histories.worst(histories.kept, lambda key: key[:1] == b"3") == b"3, end"
    assert histories.worst(histories.kept, {b"3, mark", b"3"}.__contains__) == b"3"


def test_a_state_with_which_a_second_chat_begins_is_not_superseded() -> None:
    histories = StateHistories(10)
    first = histories.begin(None, ())
    histories.add(b"system", first)
    histories.add(b"system, first", first)
    second = histories.begin(b"system", ())
    histories.add(b"system, second", second)
    assert histories.worst(histories.kept, lambda _: True, only_superseded=True) is None
    third = histories.begin(b"system", ())
    assert second is not first
    assert third not in (first, second)


def test_states_saved_by_two_chats_are_shared() -> None:
    histories = StateHistories(10)
    for chat in (b"first", b"second"):
        history = histories.begin(None, ())
        histories.add(b"system", history)
        histories.add(b"system, " + chat, history)
        is_superseded = histories.worst(histories.kept, lambda _: True, only_superseded=True) == b"system"
        assert is_superseded == (chat == b"first")
        if is_superseded:
            histories.remove(histories.kept, b"system", is_remembered=True)


@pytest.mark.parametrize(("room", "least"), [(24, 0.7), (16, 0.45)])
def test_of_many_states_the_oldest_and_the_newest_are_looked_at(
    room: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats that take turns lose no more by that; where all of those are in use, another one goes."""
    monkeypatch.setattr(state_histories, "LOOKED_AT", 3)
    chats = Chats(room)
    chats.found([*range(32)] * 3)
    assert chats.found([*range(32)] * 4) >= least
    kept, looked_at = chats.histories.kept, list[History]()
    expected_wait = StateHistories.expected_wait

    def counted(self: StateHistories, history: History) -> float:
        looked_at.append(history)
        return expected_wait(self, history)

    with monkeypatch.context() as patch:
        patch.setattr(StateHistories, "expected_wait", counted)
        assert chats.histories.worst(kept, lambda _: True) in kept
    assert len(looked_at) <= 6
    used = {*list(kept)[:3], *list(kept)[-3:]}
    assert chats.histories.worst(kept, lambda key: key not in used) in kept.keys() - used
    assert chats.histories.worst(kept, lambda key: key not in used, only_superseded=True) is None
