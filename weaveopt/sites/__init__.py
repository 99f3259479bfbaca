"""What there is to rewrite: one matcher a kind of site, and what matchers share. A new matcher is one line here."""

from __future__ import annotations

from weaveopt.rule import Matcher
from weaveopt.sites.attention import AttentionMatcher
from weaveopt.sites.exchange import ExchangeMatcher
from weaveopt.sites.gather import GatherMatcher
from weaveopt.sites.mixture import MixtureMatcher
from weaveopt.sites.reduction import ReductionMatcher
from weaveopt.sites.scatter import ScatterMatcher

SEQUENCE_PARALLEL: tuple[Matcher, ...] = (GatherMatcher(), ScatterMatcher())
"""What cuts activations along their rows between the ranks."""
MATCHERS: tuple[Matcher, ...] = (
    ReductionMatcher(),
    AttentionMatcher(),
    MixtureMatcher(),
    *SEQUENCE_PARALLEL,
    ExchangeMatcher(),
)
