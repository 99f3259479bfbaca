"""Rule `token_split`: tokens in parts, so that one part's collectives run under the computation of the others."""

from weaveopt.rewrites.token_split.rule import TokenSplit as TokenSplit
