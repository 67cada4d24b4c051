"""Have a model decide about a text, and write none: examples/decide.py http://127.0.0.1:8000/v1 "I was charged twice."

The server answers each question by the probabilities of its options, which are read from a single token.
"""

import argparse
import sys

import httpx

QUESTIONS = {
    "team": {
        "type": "choice",
        "instructions": "Which team should handle this?",
        "criteria": {"billing": "payments and refunds", "shipping": "deliveries", "other": None},
    },
    "urgent": {"type": "noul", "instructions": "Does this need an answer today?"},
    "tone": {"type": "score", "instructions": "How upset is the writer?", "criteria": ["calm", "annoyed", "furious"]},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url", help="of a running `vllm-lite serve`, with /v1")
    parser.add_argument("state", nargs="?", default="My card was charged twice for one order.")
    args = parser.parse_args()
    try:
        answer = httpx.post(
            f"{args.base_url}/systemone", json={"state": args.state, "questions": QUESTIONS}, timeout=120.0
        )
    except httpx.HTTPError as error:
        print(f"{args.base_url} does not answer: {error}", file=sys.stderr)
        return 1
    found = answer.json()
    if answer.status_code != 200:
        print(found["error"]["message"], file=sys.stderr)
        return 1
    for name, decided in found["answers"].items():
        shown = ", ".join(f"{option} {value:.3f}" for option, value in decided["probabilities"].items())
        mass = found["diagnostics"][name]["label_mass"]
        print(f"{name}: {decided[decided['type']]} ({shown}; {mass:.0%} of the model's next token)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
