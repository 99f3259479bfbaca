"""Matchers: one for each kind of site, and what matchers share. A new matcher adds one line here."""

from __future__ import annotations

from weaveopt.rule import Matcher
from weaveopt.sites.attention.matcher import AttentionMatcher
from weaveopt.sites.mixture.exchange_matcher import ExchangeMatcher
from weaveopt.sites.mixture.matcher import MixtureMatcher
from weaveopt.sites.projections.matcher import ProjectionMatcher
from weaveopt.sites.reduction.matcher import ReductionMatcher
from weaveopt.sites.sequence.gather_matcher import GatherMatcher
from weaveopt.sites.sequence.scatter_matcher import ScatterMatcher

SEQUENCE_PARALLEL: tuple[Matcher, ...] = (GatherMatcher(), ScatterMatcher())
"""Matchers of sequence parallelism, in which activations are sharded by rows over the ranks."""
MATCHERS: tuple[Matcher, ...] = (
    ReductionMatcher(),
    AttentionMatcher(),
    MixtureMatcher(),
    *SEQUENCE_PARALLEL,
    ExchangeMatcher(),
    ProjectionMatcher(),
)
