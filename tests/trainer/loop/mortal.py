"""Connections to Redis on which a trainer dies, before Redis hears of a command or before the trainer hears the answer."""

import contextlib
from typing import Any

from redis.asyncio import UnixDomainSocketConnection
from redis.exceptions import ResponseError


class Died(Exception):
    """The trainer is no more."""


class Fuse:
    """Burns with every command sent; at its end the trainer dies, before or after Redis has done as it was told. What
    is `again` burns from then on, so the next life may end while it begins.
    """

    def __init__(self) -> None:
        self.left = self.again = 0
        self.is_heard = False

    def light(self, number: int) -> None:
        self.left, self.again, self.is_heard = 1 + number // 2, number % 5, number % 2 == 1

    def burns_out(self) -> bool:
        if self.left:
            self.left -= 1
            if not self.left:
                self.left, self.again = self.again, 0
                return True
        return False


class MortalConnection(UnixDomainSocketConnection):
    def __init__(self, *, fuse: Fuse, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fuse = fuse
        self.is_ready = False

    async def on_connect(self) -> None:
        self.is_ready = False
        await super().on_connect()
        self.is_ready = True

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_ready or not self.fuse.burns_out():
            return await super().send_packed_command(command, check_health)
        if self.fuse.is_heard:
            await super().send_packed_command(command, check_health)
            with contextlib.suppress(ResponseError):
                await self.read_response()
        raise Died
