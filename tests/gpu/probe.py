"""Uses each GPU once, where there are any; fails where this process, forked or not, cannot."""

from __future__ import annotations

import torch

if __name__ == "__main__":
    for index in range(torch.cuda.device_count()):
        assert int(torch.ones(8, device=f"cuda:{index}").sum()) == 8
