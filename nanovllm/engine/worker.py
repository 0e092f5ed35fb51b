"""The ranks of an engine as processes: rank 0 is the user's, the others run here and do what it sends them.

A worker gets its config, builds its part of the model as rank 0 does, then runs every `Step` that rank 0 runs. It says
nothing unless it fails. Workers are started by a command of their own: the user's script is not imported again, so it
needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch.distributed as dist

from nanovllm import platform
from nanovllm.config import EngineConfig
from nanovllm.distributed import Group, PeerError
from nanovllm.engine.build import DeviceSide
from nanovllm.engine.results import PendingResult
from nanovllm.engine.step import Step, StepResult

_HOST = "127.0.0.1"
_COMMAND = "import sys; sys.path[:] = sys.argv[3:]; from nanovllm.engine.worker import main; main(*sys.argv[1:3])"
# Seconds: for a worker to leave when told to, for the report of a failure that others noticed first, between looks
# at whether the parent lives.
_LEAVE, _REPORT, _LOOK = 5.0, 5.0, 0.5
_num_external = 0


def start(config: EngineConfig) -> DeviceSide:
    """This process's part of an engine, and with the executor "mp" the processes of all other ranks.

    Raises:
        ValueError: the config does not fit; nothing is left behind.
        RuntimeError: another rank failed; with its traceback.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return DeviceSide(config, platform.resolve_device(config.device))
    if config.distributed_executor == "external":
        return _start_external(config)
    device = platform.resolve_device(config.device)
    if device.type == "cuda":
        platform.resolve_device(config.device, size - 1)  # or the last rank would be the one to find out
    workers, group = Workers(config), None
    try:
        group = Group(0, size, workers.store, device, _HOST, workers.check)
        workers.on_failure = group.abort
        side = DeviceSide(config, device, group)
    except BaseException as error:
        workers.lose(error)
        if group is not None:
            group.close()
        raise
    side.runner = ParallelRunner(side.runner, workers)
    return side


def _start_external(config: EngineConfig) -> DeviceSide:
    """One of equals: a launcher started all ranks, they make the same calls, and nothing is sent between them but what
    layers exchange."""
    global _num_external
    size, found = config.tensor_parallel_size, os.environ.get("WORLD_SIZE")
    if found != str(size):
        raise ValueError(
            f"tensor_parallel_size={size} is not allowed with distributed_executor='external': the launcher's "
            f"WORLD_SIZE is {found}; start as many processes, such as by torchrun --nproc-per-node {size}"
        )
    rank = int(os.environ["RANK"])
    device = platform.resolve_device(config.device, int(os.environ.get("LOCAL_RANK", rank)))
    _num_external += 1  # the same on every rank, as they make the same calls
    group = Group(rank, size, dist.PrefixStore(f"nanovllm/{_num_external}", _external_store()), device)
    if len(set(map(repr, group.exchange(config)))) > 1:
        raise ValueError("the ranks' settings differ: with distributed_executor='external' all make the same calls")
    return DeviceSide(config, device, group)


@functools.cache
def _external_store() -> dist.Store:
    return next(iter(dist.rendezvous("env://")))[0]


class Workers:
    """The processes of ranks 1 and up, as rank 0 sees them.

    Attributes:
        store: where all ranks meet, on a free port of the loopback interface.
        on_failure: called, in another thread, when a worker was lost.
    """

    def __init__(self, config: EngineConfig) -> None:
        listener = socket.create_server((_HOST, 0))
        port, size = listener.getsockname()[1], config.tensor_parallel_size
        self.store = dist.TCPStore(
            _HOST, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.on_failure = lambda: None
        self._failure = ""
        self._failed, self._stopping = threading.Event(), False
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        for rank in range(1, size):
            self._launch((config, rank, port))
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-ranks", daemon=True)
        self._watcher.start()

    def _launch(self, job: tuple[EngineConfig, int, int]) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(os.getpid()), *sys.path]
        # A session of its own: Ctrl-C of the terminal is for rank 0.
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._processes.append(process)
        self._connections.append(ours)
        theirs.close()
        ours.send(job)

    def check(self) -> None:
        """Raise PeerError if a worker was lost, with what it said."""
        if self._failed.is_set():
            raise PeerError(self._failure)

    def send(self, step: Step) -> None:
        """Hand a step to all of them."""
        message = pickle.dumps(step)
        for connection in self._connections:
            connection.send_bytes(message)

    def lose(self, error: BaseException) -> None:
        """After `error` in rank 0, in the middle of what all ranks do: end the others.

        Raises:
            PeerError: another rank is the cause; with what it said.
        """
        caused = isinstance(error, (PeerError, OSError)) and self._failed.wait(_REPORT)
        if not self._failed.is_set():
            self._fail(f"rank 0 failed in the middle of a step: {type(error).__name__}: {error}")
        self.stop(0)
        if caused:
            raise PeerError(self._failure) from error

    def stop(self, seconds: float = _LEAVE) -> None:
        """End the processes, those that do not leave within so long by force; a second time does nothing."""
        self._stopping = True
        for connection in self._connections:
            try:
                connection.send_bytes(pickle.dumps(None))
            except OSError:  # it is gone
                continue
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._connections and self._watcher is not threading.current_thread():  # which may collect garbage
            self._watcher.join()
        for connection in self._connections:
            connection.close()
        self._connections, self.store = [], None
        self.on_failure = lambda: None  # or the group and this would keep each other

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._failed.set()

    def _watch(self) -> None:
        """Wait until a worker says something or its end of the pipe closes: either is a failure, unless it was told to
        leave. A worker that lost a peer names nobody, so one that failed by itself is waited for a little."""
        ranks = {connection: rank for rank, connection in enumerate(self._connections, 1)}
        reasons, deadline = [], None
        while ranks and (deadline is None or time.monotonic() < deadline):
            for connection in wait(list(ranks), None if deadline is None else 0.1):
                rank = ranks.pop(connection)
                secondary, reason = _report(connection, self._processes[rank - 1])
                reasons.append((secondary, f"rank {rank} {reason}"))
                deadline = deadline or time.monotonic() + _REPORT / 2
            if any(not secondary for secondary, _ in reasons):
                break
        if not self._stopping:
            self._fail(min(reasons)[1])
            for process in self._processes:
                process.kill()
            self.on_failure()


def _report(connection: Connection, process: subprocess.Popen) -> tuple[bool, str]:
    """What a worker said, or how it died; whether it only lost another rank comes first."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return False, f"died with exit status {process.wait()}"


class ParallelRunner:
    """Rank 0's runner, and with it all others: what it is given to run they run too."""

    def __init__(self, runner: Any, workers: Workers) -> None:
        self._runner, self._workers = runner, workers
        # Also where nobody calls exit(), at the latest when the interpreter ends.
        self._stop = weakref.finalize(self, workers.stop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, step: Step) -> ParallelResult:
        """Launch a step on every rank.

        Raises:
            RuntimeError: a worker was lost, now or before; with its traceback.
        """
        self._workers.check()
        with _uninterrupted():
            try:
                self._workers.send(step)
                return ParallelResult(self._runner.run(step), self._workers)
            except BaseException as error:
                self._workers.lose(error)
                raise

    def exit(self) -> None:
        """End the processes and let go of all memory; a second time does nothing."""
        self._stop()
        self._runner.exit()


class ParallelResult:
    """As `PendingResult`; what came of a step in which a rank was lost is not used."""

    def __init__(self, pending: PendingResult, workers: Workers) -> None:
        self._pending, self._workers = pending, workers

    def wait(self) -> StepResult:
        """The step's results; RuntimeError as in `ParallelRunner.run`."""
        result = self._pending.wait()
        self._workers.check()
        return result


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the body is done, so that no rank is left in the middle of a step that others go on with; the
    second one does not. (Python runs handlers in the main thread alone.)"""
    handler, pending = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def note(signum: int, frame: Any) -> None:
        pending.append((signum, frame))
        if len(pending) > 1:
            handler(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        handler(*pending[0])


def main(fd: str, parent: str) -> None:
    """A worker's life, from its pipe's file descriptor and its parent's process id; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("nanovllm").setLevel(logging.ERROR)  # rank 0 says what there is to say
    threading.Thread(target=_leave_with, args=(int(parent),), daemon=True).start()
    connection, status = Connection(int(fd)), 0
    try:
        _serve(connection)
    except BaseException as error:
        status = 1
        try:
            connection.send((isinstance(error, PeerError), f"failed:\n{traceback.format_exc()}"))
        except OSError:  # rank 0 is gone too
            status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads and libraries still wait for


def _serve(connection: Connection) -> None:
    config, rank, port = connection.recv()
    size = config.tensor_parallel_size
    device = platform.resolve_device(config.device, rank)
    store = dist.TCPStore(_HOST, port, size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    runner = DeviceSide(config, device, Group(rank, size, store, device, _HOST)).runner
    while (step := pickle.loads(connection.recv_bytes())) is not None:
        runner.run(step)


def _leave_with(parent: int) -> None:
    """End this process when its parent has ended, however that came."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)
