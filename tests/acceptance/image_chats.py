"""Chats of 20 turns with five images each, many at once, on a random hybrid with a tower.

    python -m tests.acceptance.image_chats [users [state_gib]]

Prints what was found, and fails if less than 98 % of what could be was, if the tower ran more often than there are
different images, or if anything of an image with another pixel was found.
"""

import sys
import tempfile
from pathlib import Path

from tests.image_chats import chat
from tests.images import make_qwen


def main(num_users: int = 32, state_gib: float | None = None) -> int:
    """Run the chats. `state_gib`: memory for states in GiB, None for the default; 0.0055 is 138 states."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_qwen(Path(folder) / "m")
        found = chat(
            checkpoint,
            num_users,
            dtype="float32",
            max_model_len=4096,
            seed=0,
            single_process=True,
            state_cache_space=state_gib,
        )
    print(f"{num_users} chats: {found}, {found.cached / found.known:.4f} of what was known")
    wrong = found.cached < 0.98 * found.known or found.num_towers != found.num_images or found.changed > found.before
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:])))
