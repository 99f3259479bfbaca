"""Fields of a configuration whose layers may differ: transformers then refuses to read them from the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def values_of(config: PreTrainedConfig | None, name: str) -> list[object]:
    """The values that a field has in the layers, each once; None where the configuration has no such field."""
    spec = getattr(config, "_heterogeneity_spec", None)  # transformers 5.24 on
    if config is None or spec is None or name not in spec.per_layer_attributes:
        return [getattr(config, name, None)]
    found: list[object] = []
    for index in range(config.num_hidden_layers):
        value = getattr(config.per_layer_config[index], name, None)
        if value not in found:
            found.append(value)
    return found
