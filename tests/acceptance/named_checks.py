"""Common parts of the scripts that check real deployments: conditions that must hold, and checks that run by name."""

import argparse
from collections.abc import Callable, Mapping, Sequence


def check(condition: bool, what: str) -> None:
    """Print whether a condition holds; end the script with status 1 if it does not."""
    print(f"{'holds' if condition else 'FAILS'}: {what}", flush=True)
    if not condition:
        raise SystemExit(1)


def run(about: str | None, checks: Mapping[str, Callable[[], None]], words: Sequence[str] | None = None) -> int:
    """Run all checks, or those that `--only` names in `words` (default: the command line). Returns the exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(checks)}")
    wanted = parser.parse_args(words).only
    for name in wanted.split(",") if wanted else checks:
        print(f"---- {name}", flush=True)
        checks[name]()
    return 0
