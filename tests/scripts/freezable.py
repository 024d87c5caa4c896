"""A client of a gate on PORT that answers every request; to be frozen and thawed from outside."""

from __future__ import annotations

import asyncio
import sys

from holdfast.engine.net.channel import connect
from holdfast.engine.wire.messages import StatusReply, StatusRequest


async def main(port: int) -> None:
    channel = await connect("127.0.0.1", port, b"s" * 32, dead_s=1.0)
    channel.send(StatusReply(text="ready"))
    while await channel.receive(StatusRequest) is not None:
        channel.send(StatusReply(text="awake"))


asyncio.run(main(int(sys.argv[1])))
