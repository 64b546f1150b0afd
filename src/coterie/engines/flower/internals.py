"""Everything of Flower that is not its public API, and why it is needed. No other module imports any of it.

Flower's public way to answer a message is an app whose code travels with the run and that a new process
executes. A site must never run code that a server ships, so `runtime` takes that process's place, and speaks
to Flower's own programs as it would. `tests/engines/flower/test_internals.py` says for each name what we rely
on, and so what an upgrade of Flower broke.
"""

# ruff: noqa: F401

from typing import Any

# Messages travel without their content, which follows in pieces; a reply that never became whole is an error.
from flwr.app import Error, Metadata
from flwr.app.message import make_message, remove_content_from_message

# Why a message has no answer (`flwr.app.Error` has the number alone); how a task says that it has ended;
# under which names a node's key, the time and its signature travel.
from flwr.common.constant import TIMESTAMP_HEADER as TIME_HEADER
from flwr.common.constant import ErrorCode, SubStatus

# The grid is told which run it is for.
from flwr.common.serde import message_to_proto, run_from_proto

# Registering sites' keys and starting the run, on loopback: Flower's command line would need an account file
# and a process for each.
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node

# Taking a task, keeping it alive, ending it; asking for replies.
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER as KEY_HEADER
from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER as SIGNATURE_HEADER
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient

# Messages are trees of objects, which travel one by one.
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    push_objects,
)

# A task is given to whoever signs with the secret of this machine; after that, its token is the proof.
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)

# Answers are of this type.
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.runtime import RuntimeHttpClient

# Messages are stamped with the run and the node of the process that makes them.
from flwr.supercore.task_identity import TaskIdentity

# A site speaks to the link as Flower's own node does: it comes, asks for messages, takes them in pieces and
# pushes its replies in pieces.
from flwr.supernode.fleet_http_client import FleetHttpClient


def __getattr__(name: str) -> Any:
    """What a server needs, when it is asked for: it brings a database, which a site has no use for."""
    if name == "build_fab_from_disk":
        # Starting a run needs an app; its code is built into what Flower wants, and loaded by nobody.
        from flwr.cli.build import build_fab_from_disk

        return build_fab_from_disk
    if name == "HttpGrid":
        # The grid that a server app is handed, made for the task that we took.
        from flwr.superlink.grid import HttpGrid

        return HttpGrid
    raise AttributeError(name)
