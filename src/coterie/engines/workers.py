"""A core per client: processes that train one client at a time, each with one thread.

Threads inside a layer do little for the small batches of private learning, and Python's own work between
layers takes one core however many there are. A worker computes exactly what the engine would compute itself,
bit for bit, so the number of workers changes nothing but the time.

Workers are started by name, not forked, and talk through socket pairs; records lie in shared memory. A worker
ends when its socket closes, also when the engine's process was killed.

`concurrent.futures` with spawned processes and torch's shared tensors was tried: the same bits, as fast (1.02
of the time of a round), but it starts a user's script again in every worker unless the script is guarded by
`if __name__ == "__main__"`, a worker that was killed is neither named nor told apart from those that the
executor then ends, and its tensors lie in /dev/shm, of which a container has 64 MB.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, current_process
from pathlib import Path
from queue import SimpleQueue
from socket import socketpair
from typing import IO, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.engines.parcels import Parcel, Parcels, nameless_file
from coterie.errors import CoterieError, one_line, where
from coterie.training.learner import Batch

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A method of the worker's own engine, and its arguments."""


class WorkerError(CoterieError):
    """A worker process failed, or is gone."""


def cores() -> int:
    """Cores of this process (taskset, a container's set), where the system tells; else of the machine."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


class WorkerPool:
    """Processes that answer calls in any order; each call goes to whichever is free."""

    def __init__(self, count: int, make: Callable[[Batch], object], table: Batch) -> None:
        """Args:

        make: builds what answers the calls in a worker, from the table of records.
        """
        self._links: list[connection.Connection] = []
        self._calls: list[Parcels] = []
        self._answers: list[Parcels] = []
        self._files: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        # Bound to the lists, not to self, so that it can run once nobody refers to the pool any more.
        self.close = weakref.finalize(self, _close, self._links, self._files, self._processes)
        arrays = tuple(tensor.numpy() for tensor in table.tensors)
        # What lies in a file is mapped from there.
        with _shared_memory(arrays[1:] if table.file else arrays) as memory, _opened(table.file) as file:
            for _ in range(count):
                self._start(memory, file)
        try:
            for link in self._links:
                # The key lets the worker open the shared memory in which torch hands over the model.
                link.send((list(sys.path), bytes(current_process().authkey)))
                link.send((make, [(array.shape, array.dtype) for array in arrays]))
            for position in range(count):
                self._receive(position, "its setup")
        except BaseException:
            self.close()
            raise

    def run(self, calls: Mapping[str, Call]) -> dict[str, Any]:
        """Answers to named calls; the names are the clients', for messages."""
        if not self.close.alive:  # its files are gone, and their numbers may be others' by now
            raise WorkerError("the workers have ended; --resume starts them again")
        waiting = deque(calls.items())
        under_way: list[deque[str]] = [deque() for _ in self._links]
        answers: dict[str, Any] = {}
        try:
            while len(answers) < len(calls):
                self._hand_out(waiting, under_way)
                busy = [link for link, names in zip(self._links, under_way, strict=True) if names]
                for link in connection.wait(busy):
                    position = self._links.index(link)  # type: ignore[arg-type]
                    name = under_way[position][0]
                    answers[name] = self._receive(position, f"client {name}")
                    under_way[position].popleft()
        except BaseException:
            self.close()  # answers still under way would be taken for those of the next calls
            raise
        return answers

    def _hand_out(self, waiting: deque[tuple[str, Call]], under_way: Sequence[deque[str]]) -> None:
        """A call for every worker that has none; then one more for each, so that none waits for the next.

        The last calls go to whoever is free, or one worker would have two left while another is done.
        """
        for ahead in (0, 1):
            for position, names in enumerate(under_way):
                if len(names) == ahead and len(waiting) > ahead * len(self._links):
                    name, call = waiting.popleft()
                    names.append(name)
                    # Two at most are under way: of the one before these, the answer has come.
                    try:
                        parcel = self._calls[position].pack(call)
                    except Exception as error:  # no room for its arrays, or something that cannot travel
                        said = f"client {name} cannot be handed to a worker process: {one_line(error)}"
                        raise WorkerError(said) from error
                    try:
                        self._links[position].send(parcel)
                    except OSError:
                        raise self._ended(position, f"client {name}") from None

    def _start(self, *files: int) -> None:
        ours, theirs = socketpair()
        calls, answers = nameless_file(), nameless_file()
        self._files += calls, answers
        shared = [calls.fileno(), answers.fileno()]
        handles = [theirs.fileno(), *shared, *(file for file in files if file >= 0)]
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, *map(str, handles)],
                pass_fds=handles,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self._processes.append(process)
        self._links.append(connection.Connection(ours.detach()))
        self._calls.append(Parcels(shared[0]))
        self._answers.append(Parcels(shared[1]))

    def _receive(self, position: int, doing: str) -> Any:
        try:
            sent = self._links[position].recv()
        except (EOFError, OSError):
            raise self._ended(position, doing) from None
        fine, answer = self._answers[position].unpack(sent)
        if not fine:
            raise WorkerError(f"the worker process for {doing} failed: {answer}")
        return answer

    def _ended(self, position: int, doing: str) -> WorkerError:
        """What to raise where a worker's socket is closed."""
        process = self._processes[position]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        code = process.poll()
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return WorkerError(f"the worker process for {doing} ended ({how}); --resume continues")


def _close(
    links: list[connection.Connection], files: list[IO[bytes]], processes: list[subprocess.Popen[bytes]]
) -> None:
    for link in links:
        link.close()
    for file in files:
        file.close()
    for process in processes:
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _shared_memory(arrays: Sequence[NDArray[Any]]) -> Iterator[int]:
    """A nameless file with the arrays in it, for as long as somebody holds it open."""
    with nameless_file() as file:
        with os.fdopen(os.dup(file.fileno()), "wb") as filled:
            for array in arrays:
                filled.write(np.ascontiguousarray(array).data)
        yield file.fileno()


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[int]:
    """The file's handle; -1 where there is none."""
    if path is None:
        yield -1
        return
    with path.open("rb") as file:
        yield file.fileno()


# --- in the worker ----------------------------------------------------------------------------------


def work(link: connection.Connection, calls_file: int, answers_file: int, memory: int, *files: int) -> None:
    """Answer calls until the engine goes away.

    Args:
        calls_file, answers_file, memory: handles of what calls, answers and the table lie in.
        files: of the table's own file, if there is one.
    """
    called, answered = Parcels(calls_file), Parcels(answers_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the engine's to handle
    torch.set_num_threads(1)
    sys.path[:], current_process().authkey = link.recv()
    try:
        make, arrays = link.recv()
        answering = make(_map_table(memory, files, arrays))
    except Exception as error:
        with contextlib.suppress(OSError):
            link.send(answered.pack((False, f"{type(error).__name__}: {error}")))
        return
    link.send(answered.pack((True, None)))
    calls: SimpleQueue[Parcel] = SimpleQueue()
    threading.Thread(target=_listen, args=(link, calls), daemon=True).start()
    while True:
        link.send(_packed(answered, _answer(answering, called, calls.get())))


def _packed(answered: Parcels, answer: tuple[bool, Any]) -> Parcel:
    try:
        return answered.pack(answer)
    except Exception as error:  # no room for its arrays, or something that cannot travel
        return answered.pack((False, where(error)))  # its text may tell of the records


def _answer(answering: object, called: Parcels, call: Parcel) -> tuple[bool, Any]:
    """Whether it went well, and what came of it."""
    try:
        method, arguments = called.unpack(call)
    except Exception as error:  # a class that is known to the engine's own script only; it tells of no record
        return False, f"it cannot read what it is sent: {type(error).__name__}: {error}"
    try:
        return True, getattr(answering, method)(*arguments)
    except CoterieError as error:
        return False, " ".join(str(error).split())
    except Exception as error:
        return False, where(error)  # its text may tell of the records


def _listen(link: connection.Connection, calls: "SimpleQueue[Parcel]") -> None:
    """Take calls; when the other end is gone, end this process even in the middle of a long step.

    Also where a call cannot be received, for want of memory: the engine waits for an answer, and sees that.
    """
    code = 1
    try:
        while True:
            calls.put(link.recv())
    except (EOFError, OSError):
        code = 0
    finally:
        os._exit(code)


def _map_table(
    memory: int, features: Sequence[int], arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
) -> Batch:
    found, offset = [], 0
    with contextlib.ExitStack() as stack:
        shared = stack.enter_context(open(memory, "rb"))
        files = [stack.enter_context(open(file, "rb")) for file in features]
        for shape, kind in arrays:
            source, first = (files.pop(), 0) if files else (shared, offset)
            array = np.memmap(source, kind, mode="c", offset=first, shape=shape)  # what is written stays here
            found.append(torch.from_numpy(array))
            offset += array.nbytes if source is shared else 0
    return Batch(*found)


if __name__ == "__main__":
    from coterie.engines import workers  # the module under its own name, as the engine's messages spell it

    workers.work(connection.Connection(int(sys.argv[1])), *map(int, sys.argv[2:]))
