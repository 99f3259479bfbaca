"""What there is to rewrite: one matcher a kind of site, and what matchers share. A new matcher is one line here."""

from __future__ import annotations

from weaveopt.rule import Matcher
from weaveopt.sites.attention import AttentionMatcher
from weaveopt.sites.reduction import ReductionMatcher

MATCHERS: tuple[Matcher, ...] = (ReductionMatcher(), AttentionMatcher())
