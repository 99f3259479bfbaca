"""Setup of the tests of continuous batching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from weaveopt.integrations.transformers import continuous_batching as module


@pytest.fixture(autouse=True)
def own_update() -> Iterator[None]:
    """Each test begins with transformers' own cache."""
    update = PagedAttentionCache.update
    own = getattr(update, "__wrapped__", update) if module._install.cache_info().currsize else update
    PagedAttentionCache.update = own
    module._install.cache_clear()
    yield
    PagedAttentionCache.update = own
    module._install.cache_clear()
