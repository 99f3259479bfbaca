"""Text for a terminal: its width and its colors, as the environment and the terminal ask for."""

from __future__ import annotations

import io
import os
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

DEFAULT_WIDTH = 120
"""Width used if there is neither a terminal nor COLUMNS."""
MINIMUM_WIDTH = 60
"""Below this the words of the tables do not fit side by side; a narrower terminal folds the lines."""


def width_of(stream: TextIO | None = None) -> int:
    """Columns of what is written to `stream`: COLUMNS, else the terminal's, else 120."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and int(asked) > 0:
        return max(int(asked), MINIMUM_WIDTH)
    if stream is not None and stream.isatty():
        return max(os.get_terminal_size(stream.fileno()).columns, MINIMUM_WIDTH)
    return DEFAULT_WIDTH


def colored(stream: TextIO) -> bool:
    """True for a terminal that takes colors, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def to_text(renderable: RenderableType, width: int | None = None, color: bool = False) -> str:
    """Lines of at most `width` columns (default: `width_of()`), without spaces at their ends."""
    console = Console(
        file=io.StringIO(),
        width=width or width_of(),
        force_terminal=color,
        color_system="standard" if color else None,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def to_html(text: str) -> str:
    """Text with a terminal's colors as preformatted HTML, escaped."""
    console = Console(file=io.StringIO(), record=True, width=max(map(len, text.splitlines()), default=0) + 1)
    console.print(Text.from_ansi(text), soft_wrap=True)
    pre = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=pre)
