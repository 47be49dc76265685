"""The client app of the deployment's tests: honest, until a file tells its node what else to do."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto

from incofl.flower import make_client_app

honest = make_client_app()
app = ClientApp()
ORDERS = Path(os.environ["INCOFL_TEST_ORDERS"])


def spoil(deed: str, content: RecordDict, old: Path) -> RecordDict:
    """What is sent instead of an honest reply."""
    update: Any = content["update"]
    values = update["head.bias"].numpy().copy()
    match deed.split():
        case ["nan"]:
            values[0] = float("nan")
            update["head.bias"] = Array(values)
        case ["shape"]:
            update["head.bias"] = Array(np.concatenate([values, values]))
        case ["one"]:  # would be broadcast
            update["head.bias"] = Array(values[:1])
        case ["extra"]:
            update["head.other"] = Array(values)
        case ["garbage", size]:
            update["head.bias"] = Array("float32", (10,), "numpy.ndarray", os.urandom(int(size)))
        case ["replay"]:
            proto = Proto()
            proto.ParseFromString(old.read_bytes())
            return recorddict_from_proto(proto)
    return content


def train(message: Message, context: Context) -> Message:
    """An honest turn, and then what the node was told."""
    node, record = context.node_config["partition-id"], message.content["order"]
    order, old = ORDERS / f"{node}-{record['round'] + 1}", ORDERS / f"{node}.reply"
    deed = order.read_text() if order.exists() else ""
    order.unlink(missing_ok=True)
    if deed.startswith("slow"):
        time.sleep(float(deed.split()[1]))
    if deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    content = honest(message, context).content
    sent = spoil(deed, content, old)
    if not deed:
        old.write_bytes(recorddict_to_proto(content).SerializeToString())
    return Message(sent, reply_to=message)


app.train()(train)
app.query()(honest)
