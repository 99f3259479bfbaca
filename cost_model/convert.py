"""`python -m weaveopt.cost_model.convert OLD NEW`: writes a profile anew, in today's schema and layout."""

from __future__ import annotations

import sys
from pathlib import Path

from weaveopt.cost_model.profile import dumps, load
from weaveopt.errors import ProfileError


def main(arguments: list[str]) -> int:
    """Returns the exit code: 2 for anything but two words, or for a file that is no profile."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m weaveopt.cost_model.convert OLD NEW\n")
        return 2
    old, new = arguments
    try:
        text = dumps(load(old))
        Path(new).write_text(text, encoding="utf-8")
    except (ProfileError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
