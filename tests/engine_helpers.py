"""What tests of a whole engine share: the books of an idle one, preemptions counted, answers held to the oracle."""

import random
from functools import lru_cache

import torch
from checkpoints import hf_full_logprobs, hf_greedy

from nanovllm import SamplingParams

TOLERANCE = 1e-4  # of log probabilities, in float32


def greedy(max_tokens=16, **params):
    """Greedy decoding past eos, with two top log probabilities."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2, **params})


def make_prompts(*lengths, seed=1):
    """Random prompts without special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(500) for _ in range(length)] for length in lengths]


def check_idle(llm):
    """Nothing is left of any request, and every block and row is free."""
    engine = llm.engine
    scheduler = engine.scheduler
    assert not engine.has_unfinished
    assert engine._in_flight is None
    scheduler.check()
    assert scheduler.block_manager.num_free == len(scheduler.block_manager.blocks)
    assert len(scheduler._free_rows) == engine.config.max_num_seqs


class SequenceLog(list):
    """Every sequence that an engine is given from now on."""

    def __init__(self, llm):
        super().__init__()
        self._add = llm.engine.scheduler.add
        llm.engine.scheduler.add = self._record

    def _record(self, seq):
        self.append(seq)
        self._add(seq)

    @property
    def num_preemptions(self):
        """Of all of them together."""
        return sum(seq.num_preemptions for seq in self)


@lru_cache(maxsize=512)
def _oracle(path, prompt, max_tokens, eos_ids):
    tokens = hf_greedy(path, prompt, max_tokens, eos_ids)
    return tokens, hf_full_logprobs(path, [*prompt, *tokens])[len(prompt) - 1 : -1]


def oracle_tokens(path, prompt, max_tokens, eos_ids=()):
    """transformers' greedy continuation."""
    return _oracle(path, tuple(prompt), max_tokens, eos_ids)[0]


def check_output(path, prompt, output, max_tokens, eos_ids=()):
    """A greedy output is transformers' own: the same tokens, and log probabilities within the tolerance."""
    tokens, full = _oracle(path, tuple(prompt), max_tokens, eos_ids)
    assert output["token_ids"] == tokens
    chosen = full.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output["logprobs"]), chosen, rtol=0, atol=TOLERANCE)
    for top, expected in zip(output["top_logprobs"], full, strict=True):
        values = torch.tensor([entry.logprob for entry in top.values()])
        torch.testing.assert_close(values, expected[list(top)], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(values, expected.topk(len(top)).values, rtol=0, atol=TOLERANCE)


def generate(llm, prompts, params):
    """llm.generate without a progress bar."""
    return llm.generate(prompts, params, use_tqdm=False)


def check_generate(llm, path, prompts, max_tokens=16):
    """Generate greedily and hold every answer to the oracle; returns the outputs."""
    outputs = generate(llm, prompts, greedy(max_tokens))
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["prompt_token_ids"] == prompt
        assert output["finish_reason"] == "length"
        check_output(path, prompt, output, max_tokens)
    return outputs
