"""The server's process in the place of the one in which Flower would run a server app.

Flower runs an app by fetching its code from the link and starting a process. Here `coterie serve` is that
process: it acquires the task (with the secret that only it and its own link share), and is its grid. The code
that goes with the run is opened by nobody.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from flwr.app import Message

from coterie.engines.flower import internals as flower
from coterie.errors import CoterieError

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
    """Takes the tasks of a link, which gives them to whoever knows the secret."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        authority: bytes | None = None,
        kind: Any = flower.TaskType.SERVER_APP,
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

    def beat() -> None:
        with contextlib.suppress(httpx.HTTPError):
            client.SendTaskHeartbeat(flower.SendTaskHeartbeatRequest())

    beat()
    with repeating(beat, HEARTBEAT_SECONDS, "heartbeat"):
        yield


@contextlib.contextmanager
def repeating(work: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Do something again and again, after so many seconds each time, in a thread beside us."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


UNFINISHED_SECONDS = 20.0
"""After so long without another piece, a reply is taken for cut off."""


@dataclass
class Arriving:
    """A reply whose head has come, and those of its pieces that have."""

    reply_to: str
    tree: Any
    pieces: dict[str, bytes]
    since: float


class PromptGrid(flower.HttpGrid):  # type: ignore[misc]
    """Takes what has come, and waits for nothing: what is not whole yet is looked for again next time.

    Flower's own waits for every piece of a reply, for minutes, while nobody else is answered or asked again.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arriving: dict[str, Arriving] = {}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        self._arriving = {name: each for name, each in self._arriving.items() if each.reply_to in wanted}
        new = wanted - {each.reply_to for each in self._arriving.values()}
        if new:
            request = flower.PullAppMessagesRequest(message_ids=sorted(new))
            found = self._runtime_client.PullMessages(request)
            for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                told = head.metadata
                self._arriving[told.message_id] = Arriving(
                    told.reply_to_message_id, tree, {}, time.monotonic()
                )
        replies = [self._take(identity) for identity in list(self._arriving)]
        return [reply for reply in replies if reply is not None]

    def _take(self, identity: str) -> Message | None:
        """A reply that is whole now, or will never be; None where there is still hope."""
        arriving = self._arriving[identity]
        run = self.run.run_id
        pull = flower.make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, run)
        for each in flower.iterate_object_tree(arriving.tree):
            if each.object_id in arriving.pieces:
                continue
            try:
                arriving.pieces[each.object_id] = pull(each.object_id)
                arriving.since = time.monotonic()
            except flower.ObjectUnavailableError:
                if time.monotonic() - arriving.since < UNFINISHED_SECONDS:
                    return None
                return self._unfinished(identity)
            except flower.ObjectPullError:
                return self._unfinished(identity)
        del self._arriving[identity]
        confirm = flower.ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=identity)
        self._runtime_client.ConfirmMessageReceived(confirm)
        message = flower.inflate_object_from_contents(identity, arriving.pieces)
        message.metadata.__dict__["_message_id"] = identity
        return cast(Message, message)

    def _unfinished(self, identity: str) -> Message:
        """An error in place of a reply that was cut off."""
        arriving, node = self._arriving.pop(identity), self.node.node_id
        metadata = flower.Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=node,
            dst_node_id=node,
            message_type="system",
            group_id="",
            ttl=0,
            reply_to_message_id=arriving.reply_to,
            created_at=time.time(),
        )
        error = flower.Error(code=flower.ErrorCode.MESSAGE_UNAVAILABLE, reason="the reply was cut off")
        return cast(Message, flower.make_message(metadata=metadata, error=error))


@contextlib.contextmanager
def server_grid(address: str, secret: bytes, authority: bytes | None) -> Iterator[PromptGrid]:
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
        grid = PromptGrid(address, authority is None, authority, token=token)
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
