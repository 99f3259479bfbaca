"""The frozen records that travel between the steps: plain values, never a graph node or a tensor."""
