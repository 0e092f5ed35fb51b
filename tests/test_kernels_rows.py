"""The two ends of a decode step: kernels against the references, padding included."""

import pytest
import torch
from triton_tools import COMPILED, DEVICES, SHARED_MEMORY, check_compiles, interpreted, record_launches

from nanovllm.kernels import decode_rows, decode_rows_triton


def state(num_rows, max_blocks, block_size, device):
    """Rows with contexts up to what their blocks hold; the last is padding."""
    context_len = torch.randint(0, max_blocks * block_size, (num_rows + 1,))
    context_len[-1] = 0
    table = torch.randint(0, 1000, (num_rows + 1, max_blocks), dtype=torch.int32)
    return [tensor.to(device) for tensor in (torch.randint(0, 50000, (num_rows + 1,)), context_len, table)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("max_blocks", "block_size"), [(1, 16), (7, 4), (1030, 64)])
def test_gather_rows(device, max_blocks, block_size):
    tensors = state(9, max_blocks, block_size, device)
    rows = torch.tensor([3, 0, 8, 9, 9, 5], device=device)
    got = decode_rows_triton.gather_rows(rows, *tensors, block_size, 9)
    expected = decode_rows.gather_rows_ref(rows, *tensors, block_size, 9)
    for ours, reference in zip(got, expected, strict=True):
        assert ours.dtype == reference.dtype
        assert torch.equal(ours, reference)
    assert expected.slot_mapping[3:5].tolist() == [-1, -1]
    assert expected.context_lens[3:5].tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_scatter_tokens(device):
    """Rows that are not named keep their token; a failed row goes on from token 0."""
    rows, tokens = torch.tensor([4, 1, 2], device=device), torch.tensor([7, -1, 9], device=device)
    results = []
    for scatter in (decode_rows_triton.scatter_tokens, decode_rows.scatter_tokens_ref):
        last_token = torch.full((6,), 5, device=device)
        scatter(rows, tokens, last_token)
        results.append(last_token.tolist())
    assert results[0] == results[1] == [5, 0, 9, 5, 7, 5]


@COMPILED
def test_compiles():
    rows, tensors = torch.arange(3), state(9, 640, 64, "cpu")
    launches = record_launches(decode_rows_triton, lambda: decode_rows_triton.gather_rows(rows, *tensors, 64, 9))
    launches += record_launches(decode_rows_triton, lambda: decode_rows_triton.scatter_tokens(rows, rows, tensors[0]))
    check_compiles([(launch, cc) for cc in SHARED_MEMORY for launch in launches])


@COMPILED
def test_under_the_interpreter():
    with interpreted(__file__) as finish:
        finish()
