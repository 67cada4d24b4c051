"""A worker that is told which drafts are right: `speculation.py --odds` has engines start it in place of their own.

The drafter does its work, and then each of its drafts is replaced by the token that the model will draw there, or by
another one, with the odds of the draft's place behind a right one. So shapes of models can be measured whose heads or
draft models are not at hand. Whether a place in an answer is hard does not depend on when it is drafted.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from vllm_lite.process_settings import WorkerSettings
from vllm_lite.runtime.supervise import run_child
from vllm_lite.worker import process

ODDS, TOKENS = "TOLD_ODDS", "TOLD_TOKENS"
"""Variables: the odds of each place, as JSON, and the file with the answers that there will be."""
KEY_TOKENS = 16


class Teller:
    """Replaces drafts."""

    def __init__(self, odds: list[float], file: Path) -> None:
        self._odds, self._file = odds, file
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tell(self, tokens: Any, drafts: Any) -> Any:  # int32 [num_tokens], [num_drafts]
        """Replace the drafts for a sequence with these tokens by right or wrong ones."""
        answer = self._answer(tuple(tokens[:KEY_TOKENS].tolist()))
        told = np.array(drafts, np.int32)
        for place in range(len(told)):
            position = len(tokens) + place
            if position < len(answer):
                odds = self._odds[min(place, len(self._odds) - 1)]
                is_right = random.Random(position * 8191 + len(answer)).random() < odds
                told[place] = answer[position] if is_right else 1 + answer[position] % 2
        return told

    def _answer(self, key: tuple[int, ...]) -> list[int]:
        """All tokens of the sequence that begins with `key`, prompt included; [] if it is not known."""
        if key not in self._known and self._file.exists():
            for line in self._file.read_text().splitlines():
                sequence = json.loads(line)
                self._known[tuple(sequence[:KEY_TOKENS])] = sequence
        return self._known.get(key, [])


def teach() -> None:
    """Patch the worker, so that each drafter it makes has its drafts replaced by a Teller."""
    import_worker = process.import_worker

    def imported() -> Any:
        kind = import_worker()
        from vllm_lite.worker import worker

        make = worker.drafter_of  # type: ignore[attr-defined]

        def drafter_of(config: Any) -> Any:
            drafter: Any = make(config)
            if drafter.other is not None:
                before, teller = drafter.other.before, Teller(json.loads(os.environ[ODDS]), Path(os.environ[TOKENS]))
                drafter.other.before = lambda batch: list(map(teller.tell, batch.tokens, before(batch)))
            return drafter

        worker.drafter_of = drafter_of  # type: ignore[attr-defined]
        return kind

    process.import_worker = imported


if __name__ == "__main__":
    teach()
    run_child(process.process_main, WorkerSettings)
