"""A life with accidents: exceptions and Ctrl-C inside a step, exit and use after it, several engines in one process.
Whatever happens, the engine stays usable, every block is free, and the next answer is right."""

import gc
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from engine_helpers import (
    check_generate,
    check_idle,
    generate,
    greedy,
    make_prompts,
    oracle_tokens,
)

from nanovllm import LLM, SamplingParams

PROMPTS = make_prompts(9, 5, 14)
TINY = {"dtype": "float32", "device": "cpu", "kvcache_block_size": 4, "num_kvcache_blocks": 64}

pytestmark = pytest.mark.timeout(60)  # what goes wrong here would hang


class Accident(Exception):
    """What a device may raise."""


def before_the_step(runner, error):
    """The step never ran: what its blocks were to hold is not there."""

    def run(step):
        raise error

    runner.run = run


def within_the_model(runner, error):
    """The first layers wrote their KV, the last ones did not; rows have started."""

    def forward(*args):
        raise error

    runner.model.model.norm.add = forward


def before_sampling(runner, error):
    """All KV is written, no token is drawn."""

    def compute_logits(hidden, out=None):
        raise error

    runner.model.compute_logits = compute_logits


def at_the_result(runner, error):
    """The device reports late: a step behind, while the next one is on its way."""
    run = runner.run

    def wait():
        raise error

    def run_and_fail(step):
        pending = run(step)
        pending.wait = wait
        return pending

    runner.run = run_and_fail


def break_at_step(llm, count, how, error):
    """Let the count-th step from now on fail once. Returns a function that mends the runner."""
    runner, left = llm.engine.runner, [count]
    run = type(runner).run

    def counted(step):
        left[0] -= 1
        if left[0] == 0:
            del runner.run
            how(runner, error)
            return runner.run(step)
        return run(runner, step)

    def mend():
        for owner, name in ((runner, "run"), (runner.model, "compute_logits"), (runner.model.model.norm, "add")):
            vars(owner).pop(name, None)

    runner.run = counted
    return mend


@pytest.mark.parametrize("how", [before_the_step, within_the_model, before_sampling, at_the_result])
@pytest.mark.parametrize("error", [Accident("the device is gone"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_accident_in_a_step_harms_no_later_answer(make_llm, qwen3_path, how, error, count):
    """Stale answers: the exception comes out as it is, nothing is left queued, no prefix is trusted that was never
    computed, and the same prompts give the right answers next."""
    llm = make_llm(qwen3_path, max_num_batched_tokens=16)
    mend = break_at_step(llm, count, how, error)
    with pytest.raises(type(error)):
        generate(llm, PROMPTS, greedy(6))
    mend()
    check_idle(llm)
    (output,) = check_generate(llm, qwen3_path, PROMPTS[:1])
    assert output["num_cached_tokens"] == 0
    check_generate(llm, qwen3_path, PROMPTS[::-1])


@pytest.mark.parametrize("ask", ["stream", "score", "chat"])
def test_an_accident_in_every_other_call(make_llm, qwen3_path, ask):
    """Stale answers, as above."""
    llm = make_llm(qwen3_path)
    message = [{"role": "user", "content": "What is a block?"}]
    calls = {
        "stream": lambda: list(llm.stream(PROMPTS[0], greedy(8))),
        "score": lambda: llm.score(PROMPTS),
        "chat": lambda: llm.chat(message, greedy(8), use_tqdm=False),
    }
    expected = calls[ask]()
    mend = break_at_step(llm, 1, before_the_step, Accident())
    with pytest.raises(Accident):
        calls[ask]()
    mend()
    check_idle(llm)
    again = calls[ask]()
    key = "token_logprobs" if ask == "score" else "token_ids"
    assert [one[key] for one in again] == [one[key] for one in expected]


@pytest.mark.parametrize("error", [Accident(), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
def test_an_accident_behind_the_last_token(make_llm, qwen3_path, error):
    """All answers ended at a stop token; the step launched ahead of them fails when it is read and dropped. The next
    call neither hangs nor takes that step's tokens for its own."""
    llm = make_llm(qwen3_path)
    stop = oracle_tokens(qwen3_path, PROMPTS[0], 8)[3]
    # Step 1 is the prefill; its token and three more are read before the fifth step, launched ahead, is.
    mend = break_at_step(llm, 5, at_the_result, error)
    with pytest.raises(type(error)):
        generate(llm, PROMPTS[:1], greedy(8, stop_token_ids=[stop]))
    mend()
    check_idle(llm)
    check_generate(llm, qwen3_path, PROMPTS)


def test_an_accident_ends_open_streams_too(make_llm, qwen3_path):
    """What the device held for them is lost: they end with reason abort, and do not hang."""
    llm = make_llm(qwen3_path)
    stream = llm.stream(PROMPTS[0], greedy(30))
    tokens = next(stream)["token_ids"]
    mend = break_at_step(llm, 2, before_sampling, Accident())
    with pytest.raises(Accident):
        generate(llm, PROMPTS[1:], greedy(8))
    mend()
    *items, last = stream
    tokens += [token for item in (*items, last) for token in item["token_ids"]]
    assert last["finish_reason"] == "abort"
    assert tokens == oracle_tokens(qwen3_path, PROMPTS[0], 30)[: len(tokens)]
    check_idle(llm)
    check_generate(llm, qwen3_path, PROMPTS)


# Ctrl-C as the user presses it

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from engine_helpers import check_idle, generate, greedy, make_prompts
from nanovllm import LLM
llm = LLM(sys.argv[1], dtype="float32", device="cpu", kvcache_block_size=4, num_kvcache_blocks=32, max_num_seqs=4)
prompts = make_prompts(9, 5, 14, 7, 3, 20)
expected = [output["token_ids"] for output in generate(llm, prompts, greedy(6))]
while sys.stdin.readline():
    try:
        print("ready", flush=True)
        generate(llm, prompts * 20, greedy(90))
        raise SystemExit("no Ctrl-C came")
    except KeyboardInterrupt:
        check_idle(llm)
    outputs = generate(llm, prompts, greedy(6))
    assert [output["token_ids"] for output in outputs] == expected
    check_idle(llm)
    print("fine", flush=True)
llm.exit()
"""


def test_ctrl_c_in_generate_leaves_the_engine_usable(qwen3_path):
    """A90 on one process: five real SIGINTs at different moments; after each all blocks are free and the next
    answers are right."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, qwen3_path, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for delay in (0.0, 0.05, 0.13, 0.2, 0.31):
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "ready\n", child.stderr.read()
            threading.Event().wait(delay)
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "fine\n", child.stderr.read()
        _, errors = child.communicate(timeout=20)
        assert child.returncode == 0, errors
    finally:
        child.kill()
        child.wait()


# Arguments that do not fit together


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_as_many_params_as_prompts_or_one_for_all(make_llm, qwen3_path, count):
    """Lists of unequal length: an error with both numbers, and no prompt is dropped silently or left behind."""
    llm = make_llm(qwen3_path)
    with pytest.raises(ValueError, match=rf"{count} sampling_params for 3 prompts"):
        generate(llm, PROMPTS, [greedy(2)] * count)
    messages = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    with pytest.raises(ValueError, match=rf"{count} sampling_params for 3 prompts"):
        llm.chat(messages, [greedy(2)] * count, use_tqdm=False)
    check_idle(llm)
    check_generate(llm, qwen3_path, PROMPTS)


def test_a_bad_prompt_among_good_ones_queues_nothing(make_llm, qwen3_path):
    """Stale answers: all are checked before the first is queued."""
    llm = make_llm(qwen3_path)
    for bad in ([], [512], [-1], [True], list(range(300))):
        for ask in (llm.generate, llm.score):
            with pytest.raises(ValueError):
                ask([*PROMPTS, bad])
            check_idle(llm)
    check_generate(llm, qwen3_path, PROMPTS)


def test_no_prompts_no_answers(make_llm, qwen3_path):
    llm = make_llm(qwen3_path)
    assert generate(llm, [], None) == []
    assert llm.score([]) == []


# Leaving


def test_exit_twice_and_use_after_it(make_llm, qwen3_path):
    llm = make_llm(qwen3_path)
    check_generate(llm, qwen3_path, PROMPTS)
    llm.exit()
    llm.exit()
    calls = (llm.generate, llm.score, llm.stream, lambda prompt: llm.chat([{"role": "user", "content": "x"}]))
    for call in calls:
        with pytest.raises(RuntimeError, match=r"closed by exit\(\)"):
            call(PROMPTS[0])


def test_a_with_block_exits_also_after_an_error(qwen3_path):
    with LLM(qwen3_path, **TINY) as llm:
        check_generate(llm, qwen3_path, PROMPTS)
    assert llm.engine is None
    with pytest.raises(Accident), LLM(qwen3_path, **TINY) as llm:
        raise Accident
    assert llm.engine is None


def test_exit_gives_the_memory_back(qwen3_path):
    """Weights and KV are gone though the LLM object lives on."""
    llm = LLM(qwen3_path, **TINY)
    generate(llm, PROMPTS, greedy(4))
    runner = llm.engine.runner
    held = [weakref.ref(runner.model), weakref.ref(runner.caches[0].k), weakref.ref(next(runner.model.parameters()))]
    llm.exit()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3
    assert runner is not None


@pytest.mark.parametrize("end", ["next", "close"])
def test_a_stream_outlived_by_its_engine_ends(make_llm, qwen3_path, end):
    """exit() with a stream open: the stream ends with reason abort, and leaving it does not hang."""
    llm = make_llm(qwen3_path)
    stream = llm.stream(PROMPTS[0], greedy(20))
    next(stream)
    llm.exit()
    if end == "next":
        assert [item["finish_reason"] for item in stream][-1] == "abort"
    stream.close()


def test_a_stream_left_early_leaves_nothing(make_llm, qwen3_path):
    """A81 offline: thirty streams, one item each."""
    llm = make_llm(qwen3_path)
    for _ in range(30):
        for _item in llm.stream(PROMPTS[2], greedy(20)):
            break
        check_idle(llm)
    check_generate(llm, qwen3_path, PROMPTS)


def test_a_stream_never_begun_queues_nothing(make_llm, qwen3_path):
    llm = make_llm(qwen3_path)
    stream = llm.stream(PROMPTS[0], greedy(4))
    check_idle(llm)
    stream.close()
    check_generate(llm, qwen3_path, PROMPTS)


# Several engines


def test_two_engines_take_turns(make_llm, qwen3_path, llama_path):
    """Each has its own rows, blocks and prefixes; one goes, the other stays."""
    one, other = make_llm(qwen3_path), make_llm(llama_path, kvcache_block_size=3)
    streams = [(llm.stream(PROMPTS[0], greedy(12)), path) for llm, path in ((one, qwen3_path), (other, llama_path))]
    tokens = [[], []]
    for pair in zip(*(stream for stream, _ in streams), strict=True):
        for own, item in zip(tokens, pair, strict=True):
            own += item["token_ids"]
    assert tokens == [oracle_tokens(path, PROMPTS[0], 12) for _, path in streams]
    one.exit()
    check_generate(other, llama_path, PROMPTS)


def test_two_engines_in_two_threads(make_llm, qwen3_path, llama_path):
    """At the same time: what a step keeps for its layers is each thread's own."""
    failures = []

    def work(llm, path):
        try:
            for _ in range(5):
                check_generate(llm, path, PROMPTS)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(make_llm(path), path)) for path in (qwen3_path, llama_path)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_an_engine_after_an_engine_draws_the_same(make_llm, qwen3_path):
    """Seedless requests too: their seeds come from the engine's, not from the process."""
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    runs = [[output["token_ids"] for output in generate(make_llm(qwen3_path), PROMPTS, params)] for _ in range(2)]
    assert runs[0] == runs[1]
    other = generate(make_llm(qwen3_path, seed=1), PROMPTS, params)
    assert [output["token_ids"] for output in other] != runs[0]
