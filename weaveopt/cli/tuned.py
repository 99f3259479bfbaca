"""`weaveopt tuned`: the times of local kernels that compiles left on disk, and how to wipe them."""

from __future__ import annotations

import argparse
import os

from weaveopt.autotune import kernel_store
from weaveopt.config import variable
from weaveopt.errors import OptionError
from weaveopt.wording import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", metavar="FOLDER", help="the folder (default: WEAVE_TUNE_CACHE, else the user's)")
    parser.add_argument("--wipe", action="store_true", help="delete them: the next compile times its kernels again")


def run(cache: str | None, wipe: bool) -> int:
    """List the stored times, a line each device and set of versions, or wipe them.

    Raises `OptionError` where the folder is a file, and `OSError`.
    """
    folder = kernel_store.folder_of(cache or variable("WEAVE_TUNE_CACHE"))
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OptionError(f"{'--cache' if cache else 'WEAVE_TUNE_CACHE'} {folder}: is a file, expected a folder")
    if wipe:
        print(f"{folder}: {counted(kernel_store.wipe(folder), 'file')} deleted")
        return 0
    found = kernel_store.stored(folder)
    print(f"{folder}: times of local kernels of {counted(len(found), 'device')}{':' if found else ''}")
    for path in found:
        content = kernel_store.content_of(path)
        if content is None:
            print(f"  {path.name}: not readable, counts as empty")
        else:
            words = ", ".join(f"{name} {value}" for name, value in sorted(content.device.items()) if value)
            print(f"  {path.name}: {counted(len(content.kernels), 'kernel')}; {words}")
    return 0
