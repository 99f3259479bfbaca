"""`weaveopt calibrate` on GPUs of one machine that take themselves for hosts: sets each rank's `WEAVE_HOST`.

    torchrun --nproc-per-node 2 -m tests.gpu.calibrate_hosts --base h100x2 --output hosts.json

The arguments are calibrate's. Over NVLink this is what the protocol takes, and says nothing of a network.
"""

from __future__ import annotations

import os
import sys

from tests.gpu.profiles import read_unchecked
from weaveopt.cli.main import main

if __name__ == "__main__":
    read_unchecked()
    os.environ["WEAVE_HOST"] = f"host{os.environ['RANK']}"
    sys.exit(main(["calibrate", "--device", "cuda", *sys.argv[1:]]))
