"""A site as an ordinary Flower `ClientApp`, for nodes that are started by Flower's own programs.

The node's configuration says what `coterie join` would be told: `flower-supernode --node-config
'data="/srv/records" epsilon=8.0'`. Flower then runs the code that the run ships, which is two lines that
import this module; whoever does not want to rely on that uses `coterie join`, which runs nothing it is sent.
"""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie.engines.flower import messages
from coterie.engines.flower.joining import Joining, open_site


def answer(message: Message, context: Context) -> Message:
    """Answer one message; Flower may start a process for each, so the site is opened and closed."""
    try:
        site = open_site(Joining.from_config(context.node_config))
    except Exception:  # its text may name records
        return Message(messages.refusal("failed"), reply_to=message)
    try:
        return Message(site.handle(message), reply_to=message)
    finally:
        site.close()


app = ClientApp()
for _kind in messages.KINDS:
    _category, _, _action = _kind.partition(".")
    getattr(app, _category)(_action or "default")(answer)
