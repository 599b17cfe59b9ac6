"""Every test here needs a CUDA device and says so where there is none."""

import pytest
import torch

from common.attention.triton import TritonAttention


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reason = TritonAttention.available("cuda")
    if reason is not None:
        pytest.fail(f"{reason}; run `python -m tests.gpu`")
