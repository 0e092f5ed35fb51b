"""Ctrl-C can fall between any two lines of Python. An interrupt is raised at lines all over the host side of one call;
after each the engine is idle, its books balance, and it serves the next call right.

The runner is a fake one: it is quick, and it notices a step that builds on what was lost.
"""

import sys
from types import SimpleNamespace

import pytest
from engine_helpers import SequenceLog, check_idle, generate, greedy, make_prompts
from fake_runner import FakeRunner, expected_tokens

HOST_SIDE = ("llm.py", "llm_engine.py", "scheduler.py", "block_manager.py", "sequence.py")
STRIDE = 11  # every such line of a call is interrupted; a prime, so that loops are met at each of their lines
PROMPTS = make_prompts(8, 8, 3, 8)
STOP = expected_tokens(PROMPTS[3], 12, seed=3)[-1]
PARAMS = [greedy(n, logprobs=None, n=1 + i % 2, seed=i) for i, n in enumerate((6, 9, 1))]
PARAMS.append(greedy(20, logprobs=None, n=2, seed=3, stop_token_ids=[STOP]))


class Interrupt:
    """Within it, KeyboardInterrupt comes at the count-th line of the host side; `place` says where that was."""

    def __init__(self, count):
        self.left = count
        self.place = ""

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(self._before)

    def _on_call(self, frame, event, arg):
        filename = frame.f_code.co_filename
        return self._on_line if "nanovllm" in filename and filename.endswith(HOST_SIDE) else None

    def _on_line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                file = frame.f_code.co_filename.rpartition("/")[2]
                self.place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._on_line


def start(make_llm, path):
    """An LLM with a fake runner: three rows, a pool for three prompts, chunks of six tokens."""
    llm = make_llm(path, num_kvcache_blocks=8, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=6)
    runner = FakeRunner(llm.engine.scheduler)

    def run(step):
        result = runner.run(step)
        return SimpleNamespace(wait=lambda: result)

    llm.engine.runner = SimpleNamespace(run=run, exit=lambda: None)
    return llm


def ask(llm):
    """The tokens of one call: chunks, shared prefixes, preemption, several samples, a last step that is dropped."""
    outputs = generate(llm, PROMPTS, PARAMS)
    return [[sample["token_ids"] for sample in output.get("outputs", [output])] for output in outputs]


def harm_of(llm, interrupt, expected):
    """Interrupt one call and make the next; what is wrong then, "" for nothing."""
    try:
        with interrupt:
            ask(llm)
        if interrupt.place:
            return "the interrupt was swallowed"
    except KeyboardInterrupt:
        pass
    except Exception as error:
        return f"{type(error).__name__} came out: {error}"
    try:
        check_idle(llm)
        return "" if ask(llm) == expected else "the next answers are wrong"
    except Exception as error:
        return f"afterwards {type(error).__name__}: {error}"


@pytest.mark.timeout(120)
def test_an_interrupt_at_any_line_leaves_the_engine_usable(make_llm, qwen3_path):
    """Stale answers, A90: there is no wrong moment for Ctrl-C."""
    llm = start(make_llm, qwen3_path)
    seqs = SequenceLog(llm)
    expected = ask(llm)
    assert seqs.num_preemptions > 0
    harms, places, count = [], set(), 1
    while True:
        interrupt = Interrupt(count)
        harm = harm_of(llm, interrupt, expected)
        if not interrupt.place:  # the call has no so many lines
            break
        places.add(interrupt.place)
        if harm:
            harms.append(f"{interrupt.place}: {harm}")
            llm.exit()
            llm = start(make_llm, qwen3_path)
        count += STRIDE
    assert len(places) > 150, "so few lines are not the whole host side"
    assert not harms, "\n".join([f"{len(harms)} of {count // STRIDE + 1}:", *sorted(set(harms))[:20]])
