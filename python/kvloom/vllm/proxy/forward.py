"""Requests that have nothing to transfer, sent to one decode server as they are and answered as it answers, errors too."""

from collections.abc import Mapping

from kvloom.vllm.proxy.answer import Answer
from kvloom.vllm.proxy.asked import TOKEN_BYTES
from kvloom.vllm.proxy.choose import Member, Pool
from kvloom.vllm.proxy.config import Settings
from kvloom.vllm.proxy.dispatch import Story
from kvloom.vllm.proxy.errors import Refused
from kvloom.vllm.proxy.health import Health
from kvloom.vllm.proxy.upstream import Events, Failed, Opened, Upstream


class Forward:
    """Owner: the loop's thread."""

    def __init__(self, settings: Settings, decode: Pool, upstream: Upstream, health: Health) -> None:
        self._settings = settings
        self._decode = decode
        self._upstream = upstream
        self._health = health

    async def serve(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None, answer: Answer, story: Story
    ) -> None:
        """@error Refused, Failed. A server that can't be reached is passed over for another one."""
        avoid: set[Member] = set()
        while True:
            lease = self._decode.take(len(body or b"") // TOKEN_BYTES, story.request_id.encode(), (), avoid)
            if lease is None:
                raise Refused(503, "No decode server is up.", retry_after=1)
            story.decode.append(lease.member.name)
            try:
                return await self._once(lease.member, method, path, headers, body, answer)
            except Failed as error:
                self._health.suspect(error)
                avoid.add(lease.member)
                if not error.again or len(story.decode) >= self._settings.decode_attempts:
                    raise
            finally:
                lease.release()

    async def _once(
        self, member: Member, method: str, path: str, headers: Mapping[str, str], body: bytes | None, answer: Answer
    ) -> None:
        response = await self._upstream.send(member, method, path, headers, body)
        opened = Opened(member, response, Events() if response.content_type == "text/event-stream" else None)
        try:
            await answer.relay(opened)
        finally:
            opened.close()
