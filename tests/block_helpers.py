"""Sequences for tests of the block manager alone: started as the scheduler would, without it."""

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

B = 4


def make_seq(token_ids, prompt_logprobs=None):
    return Sequence(0, list(token_ids), SamplingParams(), 0, 4, frozenset(), prompt_logprobs)


def start(manager, token_ids, prompt_logprobs=None):
    """A sequence that was admitted and whose whole prompt a launched step computes."""
    seq = make_seq(token_ids, prompt_logprobs)
    manager.share(seq, manager.find_prefix(seq))
    manager.grow(seq, len(seq.token_ids))
    seq.num_computed = len(seq.token_ids)
    manager.remember(seq)
    return seq


def known(manager, token_ids):
    """Ids of the blocks that hold the start of a prompt."""
    return [block.block_id for block in manager.find_prefix(make_seq(token_ids))]


def start_twins(manager):
    """Two sequences whose equal prompts are computed in parallel, in blocks of their own."""
    twins = [make_seq([*range(8), 50 + i]) for i in range(2)]
    for seq in twins:
        manager.grow(seq, 9)
    for seq in twins:
        seq.num_computed = 9
        manager.remember(seq)
    return twins
