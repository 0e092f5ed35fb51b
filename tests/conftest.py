"""Fixtures and markers that every test file shares. No test needs a network or a downloaded model."""

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# In the environment, so that worker processes inherit it. On tiny tensors a second thread gains nothing, and where
# both cores are busy each operator waits for it: 64 greedy steps took 2.6 s with two threads, 0.06 s with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from checkpoints import load_script, make_checkpoint


def pytest_configure(config):
    """Keep to the thread count above even where torch was imported before this file."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(config, items):
    """Skip what is marked gpu where there is none, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seeds():
    """No test depends on which tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory):
    """Tied embeddings, q/k norm, head_dim unlike hidden / heads, a Qwen-like tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=32, tokenizer=True)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory):
    """Untied head, old-style rope keys in config.json, a tokenizer that prepends BOS."""
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", tie=False, tokenizer=True, add_bos=True, legacy_config=True
    )


@pytest.fixture(scope="session")
def qwen2_path(tmp_path_factory):
    """Biases on q, k and v, tied embeddings, a Qwen-like tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", tokenizer=True)


@pytest.fixture(scope="session")
def sansho_path(tmp_path_factory):
    """Window 8, two groups, two loops, mamba and attention mixed, a tokenizer."""
    return load_script("make_sansho_export").make_export(tmp_path_factory.mktemp("sansho"))


@pytest.fixture(scope="session")
def demo_path():
    """The demo model: real text rather than random weights."""
    from demo_model import demo_model_path

    return demo_model_path()


@pytest.fixture
def make_llm():
    """make_llm(path, **knobs): an LLM on the CPU in float32 with a small pool. When the test is over, nothing may be
    left of its requests, and the books must balance."""
    from engine_helpers import check_idle

    from nanovllm import LLM

    made = []

    def make(path, **knobs):
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "kvcache_block_size": 4,
            "num_kvcache_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        }
        made.append(LLM(path, **{**defaults, **knobs}))
        return made[-1]

    yield make
    for llm in made:
        if llm.engine is not None:
            try:
                check_idle(llm)
            finally:
                llm.exit()
