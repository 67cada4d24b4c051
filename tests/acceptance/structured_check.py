"""Test every kind of engine with 200 JSON schemas and 50 regular expressions, and judge each output with other
libraries.

    python -m tests.acceptance.structured_check
    python -m tests.acceptance.structured_check --rows thinking --cases 40 --max-tokens 100

The bundled demo model knows no JSON, so nothing but the grammar keeps its outputs valid. Each case runs greedily and
sampled in each row: with and without speculation and jump-forward, one step at a time and overlapped, preempted, with
two samples, behind thinking, with two ranks. An output must be valid (jsonschema with formats, a regex engine of its
own) or be cut by max_tokens, and rows of one kind must give the same tokens. Cases that are marked as refused must be
refused. Exit status: 0 if all held, 1 if something did not.
"""

import argparse
import sys

from tests.acceptance.structured_cases import Case, load_cases
from tests.acceptance.structured_rows import HEAD, Matrix, make_rows, show
from vllm_lite.errors import RequestError
from vllm_lite.protocol.structured import StructuredOutputsParams
from vllm_lite.structured.compile import compile_grammar


def check_compiling(cases: list[Case]) -> int:
    """Check that every case compiles, or is refused if it is marked so. Returns the number of failures."""
    wrong = 0
    for case in cases:
        try:
            compile_grammar(StructuredOutputsParams(**case.wanted))
            error = None
        except RequestError as refusal:
            error = str(refusal)
        if (error is not None) != case.refused:
            wrong += 1
            print(f"    {case.name}: {error or 'was not refused'}", file=sys.stderr)
        elif error is not None:
            print(f"refused {case.name.removeprefix('refused_')}: {error}")
    return wrong


def chosen(cases: list[Case], most: int | None) -> list[Case]:
    """Choose at most `most` cases, evenly spread over all."""
    if most is None or most >= len(cases):
        return cases
    return [cases[place * len(cases) // most] for place in range(most)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--cases", type=int, help="only so many of the corpus")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the cases")
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()
    cases = load_cases()
    wrong = check_compiling(cases)
    part, num_parts = map(int, args.part.split("/"))
    kept = chosen([case for case in cases if not case.refused], args.cases)
    matrix = Matrix(kept[part - 1 :: num_parts], max_tokens=args.max_tokens)
    print(f"{len(matrix.cases)} cases\n{HEAD}")
    for row in make_rows(matrix.longest):
        if args.rows in row.name:
            result = matrix.run(row)
            show(result)
            wrong += len(result.faults)
    print(f"{wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
