"""A model of its own for each test: reports and sessions belong to the model."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.graphs.generating import build


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")
