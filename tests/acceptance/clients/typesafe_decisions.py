"""TypeSafe's package: a choice and a score about one state, and a model that is not there, by both of its clients."""

import asyncio
from typing import Any

from common import URL, check
from typesafe_sdk import AsyncTypeSafeClient, Choice, Score, TypeSafeClient, TypeSafeNotFoundError

there: dict[str, Any] = {"base_url": URL, "api_key": "none", "model": "demo"}
asked: dict[str, Any] = {
    "team": Choice(instructions="Which team?", criteria={"billing": "payments", "shipping": None}),
    "tone": Score(instructions="How upset?", criteria=["calm", "annoyed", "furious"]),
}


def expect(found: Any) -> None:
    choice, score = found.choices["team"], found.scores["tone"]
    check(choice.choice in {"billing", "shipping"} and abs(sum(choice.probabilities.values()) - 1) < 1e-6)
    check(0 <= score.score <= 2 and found.usage.output_tokens == 2)


async def at_once() -> None:
    async with AsyncTypeSafeClient(**there) as client:
        state = {"ticket": "I was charged twice."}
        for found in await asyncio.gather(*(client.system_one(state=state, questions=asked) for _ in range(4))):
            expect(found)


with TypeSafeClient(**there) as client:
    expect(client.system_one(state="I was charged twice.", questions=asked))
    try:
        client.system_one(state="I was charged twice.", questions=asked, model="other")
    except TypeSafeNotFoundError:
        pass
    else:
        raise SystemExit("a model that is not there was asked")
asyncio.run(at_once())
