"""End engines and servers of this user: SIGTERM, so that running requests may end, and with --force SIGKILL after the
timeout. Exit status 1 if one is still running, or none matches."""

import argparse
import sys

from vllm_lite.client.engines.instances import clean, end, find, wanted


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", metavar="TARGET", nargs="+", help="pid, model name, or all; see vllm-lite ps")
    parser.add_argument("--timeout", type=float, default=15.0, metavar="S", help="time to end after SIGTERM [15]")
    parser.add_argument("--force", action="store_true", help="then SIGKILL")


def run(arguments: argparse.Namespace) -> int:
    instances, status = find(), 0
    for target in arguments.targets:
        meant = wanted(instances, target)
        if not meant and target != "all":
            print(f"vllm-lite kill: no engine of yours is {target!r}; vllm-lite ps lists them", file=sys.stderr)
            status = 1
        for instance in meant:
            instances.remove(instance)
            if instance.state == "stale":
                clean(instance)
                continue
            pid = instance.record.main.pid
            ending = end(instance, arguments.timeout, force=arguments.force)
            advice = "; --force kills it" if ending == "still running" and not arguments.force else ""
            print(f"{pid} {instance.record.model}: {ending}{advice}")
            status = status or int(ending == "still running")
    return status
