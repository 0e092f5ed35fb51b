"""The oracle itself: a tiny checkpoint must wander when decoded, and must show a parameter that was forgotten."""

import copy

import pytest
import torch
from checkpoints import hf_full_logprobs, hf_greedy, hf_logprobs, hf_model

PROMPT = [17, 230, 5, 301, 77, 301, 140, 9, 411, 62, 5, 300]


@pytest.fixture(params=["qwen3_path", "llama_path", "qwen2_path"])
def path(request):
    """Each tiny checkpoint in turn."""
    return request.getfixturevalue(request.param)


def test_greedy_wanders(path):
    """Equal tokens prove something only where many differ and none is a near tie."""
    tokens = hf_greedy(path, PROMPT, 64)
    logprobs = hf_full_logprobs(path, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    best, second = logprobs.topk(2).values.unbind(1)
    assert len(set(tokens)) >= 24, f"greedy decoding repeats itself: {tokens}"
    assert float((best - second).min()) > 1e-3, "two tokens are too close for float32"
    assert logprobs.argmax(-1).tolist() == tokens, "with and without a cache differ"


def test_greedy_ends_at_eos(path):
    """The token that ends a sequence is part of it, and nothing comes after."""
    tokens = hf_greedy(path, PROMPT, 16)
    assert hf_greedy(path, PROMPT, 16, eos_ids=(tokens[5],)) == tokens[: tokens.index(tokens[5]) + 1]


def test_logprobs_are_aligned(path):
    """Entry i belongs to ids[i + 1]."""
    full = hf_full_logprobs(path, PROMPT)
    expected = torch.stack([full[i, PROMPT[i + 1]] for i in range(len(PROMPT) - 1)])
    torch.testing.assert_close(hf_logprobs(path, PROMPT), expected)


def test_every_parameter_matters(path):
    """A weight or bias left at its usual start value moves log probabilities by far more than the 1e-4 allowed."""
    model, original = copy.deepcopy(hf_model(path)), hf_full_logprobs(path, PROMPT)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            kept = parameter.detach().clone()
            parameter.fill_(1.0 if "norm" in name else 0.0)
            changed = model(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
            parameter.copy_(kept)
            difference = float((changed - original).abs().nan_to_num(torch.inf).max())
            assert difference > 0.01, f"{name} could be forgotten unseen: {difference:.1e}"
