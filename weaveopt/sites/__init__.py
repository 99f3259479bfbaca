"""Matchers: one for each kind of site, and what matchers share. A new matcher adds one line here."""

from __future__ import annotations

from weaveopt.rule import Matcher
from weaveopt.sites.attention import AttentionMatcher
from weaveopt.sites.exchange import ExchangeMatcher
from weaveopt.sites.gather import GatherMatcher
from weaveopt.sites.mixture import MixtureMatcher
from weaveopt.sites.reduction import ReductionMatcher
from weaveopt.sites.scatter import ScatterMatcher

SEQUENCE_PARALLEL: tuple[Matcher, ...] = (GatherMatcher(), ScatterMatcher())
"""Matchers of sequence parallelism, in which activations are sharded by rows over the ranks."""
MATCHERS: tuple[Matcher, ...] = (
    ReductionMatcher(),
    AttentionMatcher(),
    MixtureMatcher(),
    *SEQUENCE_PARALLEL,
    ExchangeMatcher(),
)
