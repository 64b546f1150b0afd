"""Everything of Flower that is not its public API, and why it is needed. No other module imports any of it.

Flower's public way to answer a message is an app whose code travels with the run and that a new process
executes. A site must never run code that a server ships, so `runtime` takes that process's place, and speaks
to Flower's own programs as it would. `tests/engines/flower/test_internals.py` says for each name what we rely
on, and so what an upgrade of Flower broke.
"""

# ruff: noqa: F401

# Starting a run needs an app; its code is built into what Flower wants, and loaded by nobody.
from flwr.cli.build import build_fab_from_disk

# The header with a node's key, by which the proxy counts what each node pushes; why a message has no answer
# (`flwr.app.Error` has the number alone); how a task says that it has ended.
from flwr.common.constant import PUBLIC_KEY_HEADER, ErrorCode, SubStatus

# A task hands its context back when it has ended, and the grid is told which run it is for.
from flwr.common.serde import context_to_proto, run_from_proto

# Registering sites' keys and starting the run, on loopback: Flower's command line would need an account file
# and a process for each.
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest

# Taking a task, keeping it alive, ending it.
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient

# A task is given to whoever signs with the secret of this machine; after that, its token is the proof.
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.runtime import RuntimeHttpClient

# Messages are stamped with the run and the node of the process that makes them.
from flwr.supercore.task_identity import TaskIdentity

# The grid that a server app is handed, made for the task that we took.
from flwr.superlink.grid import HttpGrid

# A message of a task arrives and leaves in pieces.
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message
