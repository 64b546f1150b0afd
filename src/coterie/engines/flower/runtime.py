"""Our process in the place of the one in which Flower would run an app.

Flower runs an app by fetching its code from the link and starting a process for every message. A site must
never run code that a server ships, and need not pay seconds for every message. So our process takes the place
of that one: it acquires the tasks (with the secret that only it and its own node or link share), pulls a
task's message, answers with its own installed code, and pushes the reply. The code that the link offers is
not even opened.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict

from coterie.engines.flower import internals as flower
from coterie.engines.flower.messages import site_log
from coterie.errors import CoterieError

log = site_log(__name__)

HEARTBEAT_SECONDS = 10.0
LINK_SECONDS = 60.0
"""How long the server tries to reach its own link, on its own machine, before it gives up."""
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class Unreachable(CoterieError):
    """Flower's program on this machine does not answer any more."""


# --- tasks ------------------------------------------------------------------------------------------


def _connect(kind: Any, address: str, authority: bytes | None, component: str, *proofs: Any) -> Any:
    """A client of one of Flower's APIs."""
    return kind.from_server_address(
        server_address=address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=[flower.RuntimeVersionHttpInterceptor(component_name=component), *proofs],
    )


class TaskClient:
    """Takes the tasks of a node or a link, which gives them to whoever knows the secret."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        authority: bytes | None = None,
        kind: Any = flower.TaskType.CLIENT_APP,
    ) -> None:
        self.address, self.authority, self._kind = address, authority, kind
        proof = flower.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
        self._client = _connect(flower.RuntimeHttpClient, address, authority, "SuperExec", proof)
        self.close = self._client.close

    def acquire(self) -> str | None:
        """The token of the next task, if there is one."""
        try:
            found = self._client.AcquireTask(flower.AcquireTaskRequest(supported_task_types=[self._kind]))
        except httpx.HTTPError as trouble:
            raise Unreachable(f"{self.address}: {type(trouble).__name__}") from None
        return str(found.token) if found.HasField("task") and found.token else None

    def connect(self, token: str, component: str) -> Any:
        """A client that acts for one task."""
        proof = flower.RuntimeTokenHttpInterceptor(token)
        return _connect(flower.RuntimeHttpClient, self.address, self.authority, component, proof)


@contextlib.contextmanager
def _heartbeats(client: Any) -> Iterator[None]:
    """Tell Flower that the task is alive; the answer may take longer than its timeouts."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(flower.SendTaskHeartbeatRequest())

    def beat_on() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            beat()

    beat()
    thread = threading.Thread(target=beat_on, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


class TaskWorker:
    """Takes a node's tasks as they come and answers their messages, one at a time, with our own code.

    Every task has a thread, because the message of one may never arrive: a node keeps the task of a run that
    ended while it was fetching. Only answering is serial.
    """

    def __init__(self, tasks: TaskClient, handle: Callable[[Message], RecordDict]) -> None:
        self._tasks = tasks
        self._handle = handle
        self._one_at_a_time = threading.Lock()
        self._answering: set[threading.Thread] = set()
        self._trouble: httpx.HTTPError | None = None

    def take_next(self) -> bool:
        """Take the next task, if there is one."""
        if self._trouble is not None:
            raise Unreachable(f"{self._tasks.address}: {type(self._trouble).__name__}")
        token = self._tasks.acquire()
        if token is None:
            return False
        threading.Thread(target=self._attend, args=(token,), name="task", daemon=True).start()
        return True

    def settle(self, seconds: float) -> None:
        """Wait until answers that are on their way have left."""
        for thread in list(self._answering):
            thread.join(timeout=seconds)

    def _attend(self, token: str) -> None:
        client = self._tasks.connect(token, "flwr-clientapp")
        try:
            with _heartbeats(client):
                message, context, _run, _code = flower.pull_task_input(client)
                with self._one_at_a_time:
                    self._answering.add(threading.current_thread())
                    reply = Message(self._handle(message), reply_to=message)
                flower.push_message(client, reply, context)
                client.PushTaskOutput(
                    flower.PushTaskOutputRequest(
                        context=flower.context_to_proto(context), sub_status=flower.SubStatus.COMPLETED
                    )
                )
        except httpx.HTTPStatusError as refused:
            log.warning("a task was lost: the node answered %d", refused.response.status_code)
        except httpx.HTTPError as trouble:
            self._trouble = trouble
        except Exception as mistake:  # of Flower's own; its text may quote a message
            log.warning("a task was lost: %s", type(mistake).__name__)
        finally:
            self._answering.discard(threading.current_thread())
            client.close()


@contextlib.contextmanager
def server_grid(address: str, secret: bytes, authority: bytes | None) -> Iterator[flower.HttpGrid]:
    """The grid of the run that was started, in place of Flower's own server process."""
    with contextlib.ExitStack() as stack:
        tasks = TaskClient(address, secret, authority, flower.TaskType.SERVER_APP)
        stack.callback(tasks.close)
        token = tasks.acquire()
        if token is None:
            raise CoterieError("the link has no task for the run that was started")
        client = stack.enter_context(contextlib.closing(tasks.connect(token, "flwr-serverapp")))
        stack.enter_context(_heartbeats(client))
        found = client.PullTaskInput(flower.PullTaskInputRequest())
        flower.TaskIdentity.task_id = found.task_id
        flower.TaskIdentity.run_id = found.run.run_id
        flower.TaskIdentity.node_id = found.context.node_id
        grid = flower.HttpGrid(address, authority is None, authority, token=token)
        stack.callback(grid.close)
        grid.set_run(flower.run_from_proto(found.run))
        grid._retry_invoker.max_time = LINK_SECONDS
        status = flower.SubStatus.FAILED
        try:
            yield grid
            status = flower.SubStatus.COMPLETED
        finally:
            with contextlib.suppress(httpx.HTTPError):
                ended = flower.PushTaskOutputRequest(context=found.context, sub_status=status)
                client.PushTaskOutput(ended)


# --- what only the operator may do ------------------------------------------------------------------


def control(address: str, authority: bytes | None) -> contextlib.closing[Any]:
    """The link's control API, which listens on this machine alone."""
    return contextlib.closing(_connect(flower.ControlHttpClient, address, authority, "flwr CLI"))


def register(client: Any, keys: Mapping[str, bytes]) -> dict[str, int]:
    """Let the holders of these keys join; the numbers of their nodes by name."""
    listed = client.ListNodes(flower.ListNodesRequest()).nodes_info
    known = {bytes(node.public_key): int(node.node_id) for node in listed}
    for name, key in keys.items():
        if key not in known:
            wanted = flower.RegisterNodeRequest(public_key=key, name=name)
            known[key] = int(client.RegisterNode(wanted).node_id)
    return {name: known[key] for name, key in keys.items()}


def start_run(client: Any, app: Path) -> None:
    """Start a run of an app; neither side ever loads its code."""
    code = flower.build_fab_from_disk(app)
    fab = {"hash_str": hashlib.sha256(code).hexdigest(), "content": code}
    client.StartRun(flower.StartRunRequest(fab=fab))
