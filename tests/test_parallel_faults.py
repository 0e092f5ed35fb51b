"""The life of an engine's processes: whatever dies, whenever, the caller is told within seconds; nothing is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engine_helpers import check_generate, check_idle, generate, greedy, make_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.engine import build, worker

HERE = Path(__file__).parent
KNOBS = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 4,
    "num_kvcache_blocks": 64, "max_num_seqs": 4, "tensor_parallel_size": 2,
}  # fmt: skip
PROMPTS = make_prompts(9, 5, 14)
SOON = 10.0  # seconds; most is the time of this test machine's imports


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def children(pid):
    """Process ids of the running children of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:  # it has just ended
            continue
        if re.search(rf"^PPid:\t{pid}$", text, re.M) and not re.search(r"^State:\tZ", text, re.M):
            found.append(int(status.parent.name))
    return sorted(found)


def sockets(pid):
    """Sockets that a process has open: pipes to workers, connections and listening ports."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition, seconds=SOON):
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No child, no thread, no socket, no shared memory after a test that was not there before it."""

    def now():
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("nanovllm")]
        return children(os.getpid()), sockets(os.getpid()), sorted(os.listdir("/dev/shm")), threads

    before = now()
    yield
    assert wait_until(lambda: now() == before), f"{now()} is not {before}"


def workers_of(llm):
    return [process.pid for process in llm.engine.runner._workers._processes]


# Workers that fail


def test_a_worker_killed_between_calls(path):
    """The next call raises at once, and so do all later ones; exit() is fine, twice too."""
    llm = LLM(path, **KNOBS)
    check_generate(llm, path, PROMPTS)
    os.kill(workers_of(llm)[0], signal.SIGKILL)
    assert wait_until(llm.engine.runner._workers._failed.is_set)
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 died with exit status -9"):
            generate(llm, PROMPTS, greedy(4))
        assert time.monotonic() - started < 1
        check_idle(llm)
    llm.exit()
    llm.exit()


@pytest.mark.parametrize("size", [2, 4])
def test_a_worker_killed_in_generate(path, size):
    """Rank 0 is in the middle of a sum with it. Of four the others notice too, and name the one that died."""
    others = children(os.getpid())  # of other tests
    llm = LLM(path, **{**KNOBS, "tensor_parallel_size": size})
    victim = workers_of(llm)[-1]
    killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    killer.start()
    with pytest.raises(RuntimeError, match=f"rank {size - 1} died with exit status -9"):
        generate(llm, PROMPTS * 100, greedy(200))
    assert wait_until(lambda: children(os.getpid()) == others, 3)
    with pytest.raises(RuntimeError, match="died"):
        generate(llm, PROMPTS, greedy(1))
    llm.exit()


def test_an_exception_in_a_worker_comes_with_its_traceback(path):
    """A step that rank 1 alone cannot run: its table of blocks has no such row."""
    llm = LLM(path, **KNOBS)
    workers, send = llm.engine.runner._workers, llm.engine.runner._workers.send

    def spoil(step):
        rows, step.block_updates.rows = step.block_updates.rows, [10**6] * len(step.block_updates.rows)
        send(step)
        step.block_updates.rows = rows

    workers.send = spoil
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 failed:\nTraceback[\s\S]*batch.py[\s\S]*IndexError"):
        generate(llm, PROMPTS, greedy(4))
    assert time.monotonic() - started < SOON
    llm.exit()


def test_an_exception_in_rank_0_ends_the_others(path, monkeypatch):
    """They are in the middle of the step: nobody can go on. The caller gets the exception itself, then that."""
    others = children(os.getpid())
    llm = LLM(path, **KNOBS)
    monkeypatch.setattr(llm.engine.runner._runner, "_forward", lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(llm, PROMPTS, greedy(4))
    assert children(os.getpid()) == others
    with pytest.raises(RuntimeError, match="rank 0 failed in the middle of a step: ZeroDivisionError"):
        generate(llm, PROMPTS, greedy(4))
    llm.exit()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("raise OSError('no such luck')", r"rank 1 died with exit status 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died with exit status -9"),
        ("import time; time.sleep(1); 1 / 0", "rank 1 died with exit status 1"),
    ],
)
def test_a_worker_that_dies_before_it_is_there(path, monkeypatch, command, message):
    """As where a library cannot be imported: no timeout is waited for."""
    monkeypatch.setattr(worker, "_COMMAND", command)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        LLM(path, **KNOBS)
    assert time.monotonic() - started < SOON


def test_a_worker_that_cannot_load_says_why(path, monkeypatch):
    """One message, with the worker's traceback, while rank 0 is fine."""
    spoiled = "from nanovllm import loader; loader.load_weights = lambda *args: 1 / 0; from nanovllm.engine.worker"
    monkeypatch.setattr(worker, "_COMMAND", worker._COMMAND.replace("from nanovllm.engine.worker", spoiled))
    with pytest.raises(RuntimeError, match=r"rank 1 failed:\nTraceback[\s\S]*ZeroDivisionError"):
        LLM(path, **KNOBS)


def test_a_config_that_no_rank_can_take_is_rank_0s_own_error(path):
    """Not a worker's traceback."""
    with pytest.raises(ValueError, match="max_model_len=400 does not fit"):
        LLM(path, **KNOBS, max_model_len=400)


def test_an_exception_while_rank_0_loads_ends_the_others(path, monkeypatch):
    monkeypatch.setattr(build.loader, "load_weights", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM(path, **KNOBS)


# Engines beside each other


def test_two_engines_in_one_process_and_one_in_another(path):
    """A88: each has its own ports and processes; one goes, the others stay."""
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + SCRIPT
    other = subprocess.Popen(
        [sys.executable, "-c", script, path], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with LLM(path, **KNOBS) as one, LLM(path, **KNOBS) as two:
        assert other.stdout.readline() == "ready\n"
        check_generate(one, path, PROMPTS)
        check_generate(two, path, PROMPTS)
        one.exit()
        check_generate(two, path, PROMPTS)
        other.stdin.close()
    assert other.wait(20) == 0
    other.stdout.close()


def test_an_engine_that_is_dropped_ends_its_processes(path):
    """Without exit(): with the object."""
    llm = LLM(path, **KNOBS)
    pids = workers_of(llm)
    del llm
    assert wait_until(lambda: not any(map(is_alive, pids)))


# Signals to the user's process

SCRIPT = """
import gc, sys
from engine_helpers import check_idle, generate, greedy, make_prompts
from nanovllm import LLM
from test_parallel_faults import KNOBS, PROMPTS
llm = LLM(sys.argv[1], **KNOBS)
expected = [output["token_ids"] for output in generate(llm, PROMPTS, greedy(6))]
print("ready", flush=True)
while sys.stdin.readline():
    try:
        print("go", flush=True)
        generate(llm, PROMPTS * 100, greedy(100))
        raise SystemExit("no Ctrl-C came")
    except KeyboardInterrupt:
        check_idle(llm)
    outputs = generate(llm, PROMPTS, greedy(6))
    assert [output["token_ids"] for output in outputs] == expected
    check_idle(llm)
    print("fine", flush=True)
"""


@pytest.fixture
def user(path):
    """A user's process with an engine of two ranks, in a process group of its own."""
    script = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + SCRIPT
    child = subprocess.Popen(
        [sys.executable, "-c", script, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    yield child
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        pipe.close()


def test_ctrl_c_in_generate(user):
    """A90: as a terminal sends it, to the whole group, at five different moments. The engine is usable after each, and
    the end of the script ends the workers."""
    workers = children(user.pid)
    assert len(workers) == 1
    for delay in (0.0, 0.05, 0.13, 0.2, 0.31):
        user.stdin.write("go\n")
        user.stdin.flush()
        assert user.stdout.readline() == "go\n", user.stderr.read()
        time.sleep(delay)
        os.killpg(user.pid, signal.SIGINT)
        assert user.stdout.readline() == "fine\n", user.stderr.read()
    assert children(user.pid) == workers
    user.stdin.close()
    assert user.wait(SOON) == 0
    assert wait_until(lambda: not any(map(is_alive, workers)))


@pytest.mark.parametrize("busy", [False, True])
def test_a_killed_parent_leaves_no_worker(user, busy):
    """A90: SIGKILL, between calls and in one."""
    workers = children(user.pid)
    assert len(workers) == 1
    if busy:
        user.stdin.write("go\n")
        user.stdin.flush()
        assert user.stdout.readline() == "go\n"
        time.sleep(0.2)
    user.kill()
    user.wait()
    assert wait_until(lambda: not any(map(is_alive, workers)), 5)


# The same script on every rank

EXTERNAL = """
import sys
from engine_helpers import generate, greedy, make_prompts
from nanovllm import LLM, SamplingParams
from test_parallel_faults import KNOBS, PROMPTS
for _ in range(2):  # two engines, one after the other
    with LLM(sys.argv[1], **KNOBS, distributed_executor="external") as llm:
        outputs = generate(llm, PROMPTS, greedy(8)) + generate(llm, PROMPTS, SamplingParams(max_tokens=8))
        print([output["token_ids"] for output in outputs], flush=True)
"""


def test_torchrun(path, tmp_path):
    """Every rank has all answers, and they are those of one rank."""
    with LLM(path, **{**KNOBS, "tensor_parallel_size": 1}) as llm:
        outputs = generate(llm, PROMPTS, greedy(8)) + generate(llm, PROMPTS, SamplingParams(max_tokens=8))
        expected = str([output["token_ids"] for output in outputs])
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + EXTERNAL)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), path],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(expected) == 4


@pytest.mark.parametrize("world_size", [None, "4"])
def test_external_without_its_launcher_is_refused(path, monkeypatch, world_size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=rf"WORLD_SIZE is {world_size}; .*torchrun --nproc-per-node 2"):
        LLM(path, **KNOBS, distributed_executor="external")
