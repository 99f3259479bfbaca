"""Lines of the report on local kernels: what was timed when the graph was compiled, and what hangs on what was not."""

from __future__ import annotations

from collections.abc import Iterator

from weaveopt.records.report import GraphReport
from weaveopt.reporting.reasons import collapse

SHOWN = 8
"""Kernels, and doubts, in the text; the JSON report has them all."""


def kernel_lines(graph: GraphReport) -> Iterator[str]:
    """Timed kernels with the profile's prices, longest first, and choices that an unmeasured price may turn."""
    if graph.tuned:
        yield f"local kernels: {graph.tuned}"
    for kernel in graph.kernels[:SHOWN]:
        yield (
            f"  {kernel.kernel}: timed {kernel.us:,.1f} us ±{kernel.relative_error:.0%}, "
            f"the profile says {kernel.profile_us:,.1f}"
        )
    if len(graph.kernels) > SHOWN:
        yield f"  and {len(graph.kernels) - SHOWN} more"
    yield from doubt_lines(graph)


def doubt_lines(graph: GraphReport) -> Iterator[str]:
    """Choices that rest on a price which the profile interpolates or estimates, the dearest first."""
    modules = {decision.site.id: collapse(decision.site.module or decision.site.id) for decision in graph.decisions}
    for doubt in graph.doubts[:SHOWN]:
        where = ", ".join(dict.fromkeys(modules.get(site, site) for site in doubt.sites))
        yield (
            f"hangs on a price between measured ones: {where}: {doubt.kernel}, {doubt.us:,.1f} us: its error may turn "
            f"the choice, by up to {doubt.loss_us:,.1f} us"
        )
