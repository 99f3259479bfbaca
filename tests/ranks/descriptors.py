"""A process that has no file descriptor left to open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exhausted() -> Iterator[None]:
    """Within it nothing can be opened, whatever is closed meanwhile. Descriptors that are open stay so."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert os.path.exists("/proc/self/fd/0"), "the only one below the limit"
    # Not 0: with that poll() would refuse to look at a single descriptor.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
