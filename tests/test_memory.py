"""How large the KV pool becomes: this engine's share of the device, what others hold, and what is said when nothing
is left."""

import pytest
import torch
from checkpoints import make_checkpoint
from engine_helpers import check_generate, generate, greedy, make_prompts

from nanovllm import LLM, platform
from nanovllm.engine.build import _GPU_SLACK, gpu_kv_budget

GIB = 1 << 30
CARD = 24 * GIB
WEIGHTS, PEAK = 4 * GIB, 6 * GIB


def budget(others=0, utilization=0.9, weights=WEIGHTS, peak=PEAK):
    """Of a card on which other processes hold `others` bytes."""
    free = CARD - others - weights
    return gpu_kv_budget(total=CARD, free=free, held=weights, peak=peak, utilization=utilization)


def test_an_engine_alone_gets_its_share_less_its_own_peak():
    """A89."""
    assert budget() == int(0.9 * CARD) - PEAK - _GPU_SLACK
    assert budget(utilization=0.5) == CARD // 2 - PEAK - _GPU_SLACK


def test_memory_of_other_processes_is_not_charged_to_the_share():
    """A89: others hold half of the card; a share of 0.4 still fits beside them whole."""
    assert budget(others=CARD // 2, utilization=0.4) == budget(utilization=0.4) > 0


def test_what_others_leave_is_the_limit():
    """A89: others hold half of the card; of a share of 0.9 only what is free can be had, and it is not negative."""
    left = budget(others=CARD // 2)
    assert left == CARD // 2 - PEAK - _GPU_SLACK
    assert 0 < left < budget()


def test_the_pool_and_the_largest_prefill_fit_into_the_card_together():
    """A89: whatever others hold and whatever the share, weights, activations and pool exceed neither."""
    for others in range(0, CARD, GIB):
        for utilization in (0.1, 0.5, 0.9, 1.0):
            pool = budget(others, utilization)
            assert PEAK + pool <= utilization * CARD
            assert PEAK + pool <= CARD - others


@pytest.mark.parametrize(("others", "utilization"), [(0, 0.2), (20 * GIB, 0.9), (CARD - WEIGHTS, 1.0)])
def test_nothing_left_is_a_negative_number_and_no_block(others, utilization):
    """A89: the caller refuses it; see below."""
    assert budget(others, utilization) < 0


@pytest.mark.parametrize("memory", [0, 1000])
def test_no_memory_for_one_block_is_an_error_with_numbers_and_remedy(make_llm, qwen3_path, monkeypatch, memory):
    """A89: on a CPU the remedy is a CPU's."""
    monkeypatch.setattr(platform, "cpu_memory", lambda: memory)
    with pytest.raises(ValueError, match="no memory for the KV cache") as error:
        make_llm(qwen3_path, num_kvcache_blocks=-1)
    message = str(error.value)
    assert "MiB" in message
    assert "num_kvcache_blocks" in message
    assert "gpu_memory_utilization" not in message, "there is no GPU"


def test_the_pool_is_sized_from_memory_but_no_larger_than_can_be_used(make_llm, qwen3_path, monkeypatch):
    llm = make_llm(qwen3_path, num_kvcache_blocks=-1, max_num_seqs=3)
    assert llm.engine.runner.num_blocks == 3 * 512 // 4
    check_generate(llm, qwen3_path, make_prompts(9))
    bytes_per_block = llm.engine.runner.bytes_per_block
    assert bytes_per_block == 2 * 2 * 4 * 2 * 32 * 4, "layers, K and V, tokens, heads, their size, float32"
    monkeypatch.setattr(platform, "cpu_memory", lambda: 4 * 140 * bytes_per_block)
    assert make_llm(qwen3_path, num_kvcache_blocks=-1).engine.runner.num_blocks == 139, "one block is for padding"


@pytest.mark.gpu
def test_two_engines_share_a_card(tmp_path):
    """A89: each gets its share; what the first one holds is not charged to the second."""
    path = make_checkpoint(tmp_path, dtype="bfloat16", max_position_embeddings=65536)
    share = 2 * GIB / torch.cuda.get_device_properties(0).total_memory
    knobs = {"gpu_memory_utilization": share, "skip_tokenizer_init": True}
    with LLM(path, **knobs) as one, LLM(path, **knobs) as other:
        sizes = [llm.engine.runner.num_blocks for llm in (one, other)]
        assert min(sizes) > 0.8 * max(sizes)
        answers = [generate(llm, make_prompts(20), greedy(8))[0]["token_ids"] for llm in (one, other)]
        assert answers[0] == answers[1]
