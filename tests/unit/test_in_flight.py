"""InFlight: steps leave in the order in which they came, and know the message that carries them."""

import pytest

from vllm_lite.engine.scheduling.in_flight import InFlight
from vllm_lite.protocol.step import Continue, SchedulerOutput


def schedule(in_flight: InFlight, number: int, num_tokens: int = 1) -> SchedulerOutput:
    output = SchedulerOutput(1, number, [], [Continue(0, num_tokens, [])])
    in_flight.add(output, [], num_tokens, only_decodes=num_tokens == 1)
    return output


def test_steps_travel_in_messages_and_are_confirmed_in_order() -> None:
    in_flight = InFlight()
    assert (len(in_flight), in_flight.num_unsent, in_flight.step_awaited, in_flight.awaited) == (0, 0, 0, [])
    first, second = schedule(in_flight, 1), schedule(in_flight, 2)
    assert in_flight.send(10.0) == [first, second]
    third = schedule(in_flight, 3, num_tokens=5)
    assert (len(in_flight), in_flight.num_unsent, in_flight.newest.only_decodes) == (3, 1, False)
    assert in_flight.send(11.0) == [third]
    ends = []
    for number in (1, 2, 3):
        assert in_flight.step_awaited == number
        ends.append(in_flight.oldest.ends_message)
        assert in_flight.confirm().output.step == number
    assert ends == [False, True, True]
    assert not in_flight


def test_a_message_sums_up_its_steps() -> None:
    in_flight = InFlight()
    for number, num_tokens in enumerate((1, 7, 1), 1):
        schedule(in_flight, number, num_tokens)
    message = in_flight.oldest.message
    in_flight.send(12.5)
    assert (message.num_tokens, message.num_prefill_tokens, message.sent_s) == (9, 7, 12.5)
    assert in_flight.send(13.0) == []


def test_a_result_without_a_step_is_an_error() -> None:
    with pytest.raises(IndexError):
        InFlight().confirm()
