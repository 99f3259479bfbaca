"""`python -m tests.hosts.run [WORD ...]`: runs the faults whose name has every word, and prints how each ended."""

from __future__ import annotations

import argparse
import sys
import time

from tests.emulation.emulated_hosts import Link, missing
from tests.hosts.faults import FAULTS
from tests.hosts.judge import complaints, outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.run", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--at-once", type=int, default=1)
    asked = parser.parse_args()
    if why := missing(Link(), changing=True):
        print(f"no hosts can be emulated: {why}")
        return 1
    num_wrong, begin = 0, time.monotonic()
    names = [name for name in FAULTS if all(word in name for word in asked.words)]
    for outcome in outcomes(names, asked.at_once):
        wrong = complaints(outcome)
        num_wrong += bool(wrong)
        case = outcome.case
        after = f"{time.monotonic() - begin:5.1f} s"
        print(f"{'WRONG' if wrong else 'ok   '} {after}  {case.fault}, {case.hosts} hosts x {case.ranks_per_host}")
        for rank, said in enumerate(outcome.said):
            if said is not None:
                print(f"    rank {rank}: {outcome.waited_s(rank):6.2f} s {said.error or 'right'}"[:250])
        print("".join(f"    ! {text}\n" for text in wrong), end="", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
