"""Break the connections of Responses streams repeatedly, and count lost and repeated events.

    python -m tests.acceptance.broken_responses http://127.0.0.1:8000/v1 --breaks 1000

Every event is parsed by the types of OpenAI's package. Half of the responses run in the background. The exit status is
1 at the first event that is lost, repeated or malformed.
"""

import argparse
import random
import sys
import time

import httpx

from tests.response_events import broken_stream

TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, up to /v1")
    parser.add_argument("--breaks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, count, num_streams, start_s = random.Random(args.seed), 0, 0, time.monotonic()
    with httpx.Client(base_url=args.url, timeout=TIMEOUT_S) as http:
        while count < args.breaks:
            fields = {"input": f"Tell me story number {num_streams}.", "temperature": 1.0}
            try:
                count += broken_stream(http, fields, chance, is_background=num_streams % 2 == 0)
            except AssertionError as error:
                print(f"stream {num_streams}, after {count} breaks: {error}", file=sys.stderr)
                return 1
            num_streams += 1
    taken_s = time.monotonic() - start_s
    print(f"{count} breaks in {num_streams} streams, {taken_s:.0f} s: 0 events lost, 0 repeated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
