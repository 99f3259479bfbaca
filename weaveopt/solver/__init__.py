"""Exact selection of candidates, and regimes of token counts."""
