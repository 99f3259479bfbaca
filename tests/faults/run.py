"""`python -m tests.faults.run [WORD ...]`: runs the cases whose name has every word, and prints how each ended.

`--random N` adds N random combinations, from `--seed` on.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.faults.chosen import every_fault, random_case
from tests.faults.judge import complaints, waited_s
from tests.faults.pool import Pool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="only what is wrong")
    arguments = parser.parse_args()
    cases = [random_case(arguments.seed + i) for i in range(arguments.random)] or list(every_fault())
    cases = [case for case in cases if all(word in case.name for word in arguments.words)]
    pool = Pool()
    started = time.monotonic()
    num_wrong = 0
    for case, outcome in pool.run(cases):
        wrong = complaints(case, outcome)
        num_wrong += bool(wrong)
        if wrong or not arguments.quiet:
            print(f"{'WRONG' if wrong else 'ok   '} {outcome.seconds:5.1f} s  {case.name}")
            for rank, ended in enumerate(outcome.ranks if not arguments.quiet else ()):
                said = ended.said
                after = f"{waited_s(said, outcome):6.2f} s" if said else ""
                print(f"    rank {rank}: code {ended.code} {after} {(said.error or 'right') if said else ''}"[:230])
            for text in wrong:
                print(f"    ! {text}")
            sys.stdout.flush()
    print(f"{len(cases)} cases, {num_wrong} of them wrong, {time.monotonic() - started:.1f} s; left: {pool.close()}")


if __name__ == "__main__":
    main()
