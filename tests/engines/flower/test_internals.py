"""What we rely on in Flower beside its public API: a test that fails says what an upgrade broke."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.serverapp import Grid

import coterie
from coterie.engines.flower import internals
from coterie.engines.flower.proxy import FLEET, SELF_REGISTRATION
from coterie.experiment.serving import APP

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def takes(function: Callable[..., Any], *names: str) -> bool:
    """Whether it can be called with these arguments by name, and needs no others."""
    wanted = inspect.signature(function).parameters
    needed = {
        name
        for name, parameter in wanted.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    }
    return needed - {"self"} <= set(names) <= set(wanted)


def has_fields(message: Any, names: Iterable[str]) -> bool:
    return set(names) <= {field.name for field in message.DESCRIPTOR.fields}


def connects(client: Any, *methods: str) -> bool:
    arguments = ("server_address", "insecure", "root_certificates", "interceptors")
    return takes(client.from_server_address, *arguments) and set(methods) <= set(dir(client))


def fab_is_built() -> bool:
    code = internals.build_fab_from_disk(APP)
    fab = {"hash_str": hashlib.sha256(code).hexdigest(), "content": code}
    return bool(code) and internals.StartRunRequest(fab=fab).fab.content == code


PIECES = "messages travel in other pieces"
CHECKS: dict[str, tuple[Callable[[], bool], str]] = {
    "build_fab_from_disk": (fab_is_built, "an app's folder no longer becomes the bytes of a run's code"),
    "ErrorCode": (
        lambda: (
            (
                internals.ErrorCode.MESSAGE_UNAVAILABLE,
                internals.ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
                internals.ErrorCode.NODE_UNAVAILABLE,
            )
            == (3, 4, 5)
        ),
        "messages past their time, or nodes that went away, are reported by other numbers",
    ),
    "SubStatus": (
        lambda: {internals.SubStatus.COMPLETED, internals.SubStatus.FAILED} == {"completed", "failed"},
        "a task that has ended says so in other words",
    ),
    "run_from_proto": (
        lambda: takes(internals.run_from_proto, "run_proto"),
        "the grid can no longer be told which run it is for",
    ),
    "ListNodesRequest": (
        lambda: has_fields(internals.ListNodesRequest, ()),
        "registered nodes can no longer be listed",
    ),
    "RegisterNodeRequest": (
        lambda: has_fields(internals.RegisterNodeRequest, ("public_key", "name")),
        "a site's public key can no longer be registered under its name",
    ),
    "StartRunRequest": (
        lambda: has_fields(internals.StartRunRequest, ("fab",)),
        "a run can no longer be started with the bytes of its code",
    ),
    "AcquireTaskRequest": (
        lambda: has_fields(internals.AcquireTaskRequest, ("supported_task_types",)),
        "a task can no longer be asked for by its type",
    ),
    "PullTaskInputRequest": (
        lambda: has_fields(internals.PullTaskInputRequest, ()),
        "the server's task has no input to pull",
    ),
    "PushTaskOutputRequest": (
        lambda: has_fields(internals.PushTaskOutputRequest, ("context", "sub_status")),
        "a task can no longer hand back its context and how it ended",
    ),
    "SendTaskHeartbeatRequest": (
        lambda: has_fields(internals.SendTaskHeartbeatRequest, ()),
        "a long answer can no longer be kept alive",
    ),
    "TaskType": (
        lambda: (
            {internals.TaskType.CLIENT_APP, internals.TaskType.SERVER_APP}
            == {"flwr-clientapp", "flwr-serverapp"}
        ),
        "tasks of sites and servers have other names",
    ),
    "ControlHttpClient": (
        lambda: connects(internals.ControlHttpClient, "RegisterNode", "ListNodes", "StartRun", "close"),
        "the link's control API is reached in another way",
    ),
    "RuntimeTokenHttpInterceptor": (
        lambda: takes(internals.RuntimeTokenHttpInterceptor, "token"),
        "a task's token is sent in another way",
    ),
    "RuntimeVersionHttpInterceptor": (
        lambda: takes(internals.RuntimeVersionHttpInterceptor, "component_name"),
        "programs tell their version in another way",
    ),
    "SuperExecAuthHttpInterceptor": (
        lambda: takes(internals.SuperExecAuthHttpInterceptor, "master_secret", "protected_methods"),
        "tasks are given out by another proof than the machine's secret",
    ),
    "RuntimeHttpClient": (
        lambda: connects(
            internals.RuntimeHttpClient,
            *("AcquireTask", "PullTaskInput", "PushTaskOutput", "SendTaskHeartbeat", "close"),
        ),
        "tasks are taken, kept alive or ended in another way",
    ),
    "TaskIdentity": (
        lambda: {"task_id", "run_id", "node_id"} <= set(dir(type(internals.TaskIdentity))),
        "messages are stamped with another identity than task, run and node",
    ),
    "HttpGrid": (
        lambda: (
            issubclass(internals.HttpGrid, Grid)
            and takes(internals.HttpGrid, "runtime_api_address", "insecure", "root_certificates", "token")
            and hasattr(internals.HttpGrid(token="any")._retry_invoker, "invoke")
            and internals.HttpGrid(token="any")._client is None
            and takes(internals.RuntimeHttpClient, "base_url", "retry_invoker")
        ),
        "a grid is made, or asks again, in another way: a link that is gone would be tried for ever",
    ),
    "KEY_HEADER": (
        lambda: (
            (internals.KEY_HEADER, internals.TIME_HEADER, internals.SIGNATURE_HEADER)
            == ("flwr-public-key", "flwr-timestamp", "flwr-signature")
        ),
        "a node's key travels under another header, and the proxy believes nobody",
    ),
    "TIME_HEADER": (lambda: True, "see KEY_HEADER"),
    "SIGNATURE_HEADER": (lambda: True, "see KEY_HEADER"),
    "FleetHttpClient": (
        lambda: (
            connects(
                internals.FleetHttpClient,
                *("RegisterNode", "ActivateNode", "DeactivateNode", "SendNodeHeartbeat", "PullMessages"),
                *("PushMessages", "PullObject", "PushObject", "ConfirmMessageReceived", "close"),
            )
            and isinstance(internals.FleetHttpClient("http://127.0.0.1:9")._client, httpx.Client)
        ),
        "a site comes to the link, or takes and answers messages, in another way",
    ),
    "RegisterNodeFleetRequest": (
        lambda: has_fields(internals.RegisterNodeFleetRequest, ("public_key",)),
        "a node without a key can no longer register itself",
    ),
    "ActivateNodeRequest": (
        lambda: has_fields(internals.ActivateNodeRequest, ("public_key", "heartbeat_interval")),
        "a site can no longer come online",
    ),
    "ActivateNodeResponse": (
        lambda: has_fields(internals.ActivateNodeResponse, ("node_id",)),
        "a site that was cut off has to wait until the link has forgotten it",
    ),
    "PROTOBUF_MEDIA_TYPE": (
        lambda: internals.PROTOBUF_MEDIA_TYPE.startswith("application/"),
        "see ActivateNodeResponse",
    ),
    "DeactivateNodeRequest": (
        lambda: has_fields(internals.DeactivateNodeRequest, ("node_id",)),
        "a site that leaves stays online",
    ),
    "SendNodeHeartbeatRequest": (
        lambda: has_fields(internals.SendNodeHeartbeatRequest, ("node", "heartbeat_interval")),
        "a site that computes for long is taken for gone",
    ),
    "PullMessagesRequest": (
        lambda: has_fields(internals.PullMessagesRequest, ("node",)),
        "a site can no longer ask for messages",
    ),
    "PushMessagesRequest": (
        lambda: has_fields(internals.PushMessagesRequest, ("node", "messages_list", "message_object_trees")),
        "a site can no longer push the head of an answer",
    ),
    "ConfirmMessageReceivedRequest": (
        lambda: has_fields(internals.ConfirmMessageReceivedRequest, ("node", "run_id", "message_object_id")),
        "that a message has come can no longer be confirmed",
    ),
    "PullAppMessagesRequest": (
        lambda: has_fields(internals.PullAppMessagesRequest, ("message_ids",)),
        "replies can no longer be asked for by what they reply to",
    ),
    "Node": (lambda: has_fields(internals.Node, ("node_id",)), "nodes are called in another way"),
    "message_to_proto": (
        lambda: takes(internals.message_to_proto, "message"),
        "the head of a message is written in another way",
    ),
    "make_message": (
        lambda: takes(internals.make_message, "metadata", "error"),
        "an error can no longer stand for a reply that was cut off",
    ),
    "Error": (lambda: takes(internals.Error, "code", "reason"), "see make_message"),
    "Metadata": (
        lambda: takes(
            internals.Metadata,
            *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "created_at"),
            *("ttl", "message_type", "group_id"),
        ),
        "see make_message",
    ),
    "remove_content_from_message": (
        lambda: takes(internals.remove_content_from_message, "message"),
        "the head of a message cannot be sent without its content",
    ),
    "get_all_nested_objects": (lambda: takes(internals.get_all_nested_objects, "obj"), PIECES),
    "get_object_tree": (lambda: takes(internals.get_object_tree, "obj"), PIECES),
    "iterate_object_tree": (lambda: takes(internals.iterate_object_tree, "tree"), PIECES),
    "no_object_id_recompute": (lambda: callable(internals.no_object_id_recompute), PIECES),
    "make_pull_object_fn_protobuf": (
        lambda: takes(internals.make_pull_object_fn_protobuf, "pull_object_protobuf", "node", "run_id"),
        PIECES,
    ),
    "make_push_object_fn_protobuf": (
        lambda: takes(
            internals.make_push_object_fn_protobuf, "push_object_protobuf", "node", "run_id", "session_id"
        ),
        PIECES,
    ),
    "ObjectPullError": (lambda: issubclass(internals.ObjectPullError, Exception), PIECES),
    "ObjectPushError": (lambda: issubclass(internals.ObjectPushError, Exception), PIECES),
    "ObjectUnavailableError": (lambda: issubclass(internals.ObjectUnavailableError, Exception), PIECES),
    "inflate_object_from_contents": (
        lambda: takes(internals.inflate_object_from_contents, "object_id", "object_contents"),
        PIECES,
    ),
    "push_objects": (
        lambda: takes(
            internals.push_objects, "objects", "push_object_fn", "object_ids_to_push", "max_concurrent_pushes"
        ),
        PIECES,
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_we_rely_on_is_there(name: str) -> None:
    check, broken = CHECKS[name]
    assert hasattr(internals, name), f"Flower has no {name} any more: {broken}"
    assert check(), f"Flower's {name} has changed: {broken}"


def test_every_internal_name_has_a_check() -> None:
    tree = ast.parse(Path(internals.__file__).read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr")
        for alias in node.names
    }
    assert imported == set(CHECKS)


def test_nothing_else_imports_what_is_not_public() -> None:
    for path in Path(coterie.__file__).parent.rglob("*.py"):
        if path == Path(internals.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.partition(".")[0] != "flwr" or name in PUBLIC, f"{path} imports {name}"


def test_the_proxy_knows_the_paths_of_the_link() -> None:
    """A path that was renamed would be refused, and no site could join."""
    from flwr.superlink.routers.fleet.router import router

    known = {(method, route.path.encode()) for route in router.routes for method in route.methods}
    assert known >= FLEET | SELF_REGISTRATION
