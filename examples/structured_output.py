"""Have a model fill in a form, with OpenAI's client: examples/structured_output.py http://127.0.0.1:8000/v1

The server holds the output to the schema token by token, so that it parses whatever the model is.
"""

import argparse
import sys
from typing import Annotated

import openai
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person, filled in by the model."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    hobbies: list[Annotated[str, Field(max_length=20)]] = Field(max_length=3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_url", help="of a running `vllm-lite serve`, with /v1")
    parser.add_argument("prompt", nargs="?", default="Invent a person.")
    parser.add_argument("--max-tokens", type=int, default=400)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="none")
    model = client.models.list().data[0].id
    try:
        answer = client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": args.prompt}],
            response_format=Person,
            max_tokens=args.max_tokens,
        )
    except openai.LengthFinishReasonError:
        sys.exit("structured_output: the answer was cut; give more --max-tokens")
    person = answer.choices[0].message.parsed
    if person is None:
        sys.exit("structured_output: the model refused")
    print(f"{person.name}, {person.age} years old, likes {', '.join(person.hobbies) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
