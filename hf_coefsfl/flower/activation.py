"""`python -m hf_coefsfl.flower.activation`: a `flower-supernode` that waits until the SuperLink lets it in.

A node that was killed counts as online until its heartbeat runs out, a minute later at most. Until then the SuperLink
does not activate another process with the same key, and Flower's own command gives up at once.

It also looks for the next message at better times. Flower's command looks at once after an answer, when nothing can be
there yet, and then every three seconds. And it looks more often whether the ClientApp, on the same machine, has
answered: Flower's command does so every half second.
"""

from __future__ import annotations

import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

logger = logging.getLogger("flwr")
_PAUSE, _LONGEST_PAUSE, _GROWTH = 5.0, 60.0, 1.5  # seconds between two attempts, and how they grow
_ABSENCE = 3.0  # seconds in which the server looks several times
_LOOKS = (0.5, 1.0, 2.0)  # seconds before each of the first looks for a message after an answer; then Flower's pauses
_ANSWERS, _OWN_LOOK = 0.5, 0.05  # seconds between two of Flower's looks for an answer of the ClientApp, and ours


class PatientClient(FleetHttpClient):
    """Asks to be activated until it is; the user may stop it at any time.

    After an answer it looks for the next message with growing pauses.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._client.headers.clear()  # what HTTP does not need: each request of a message has them
        self._client.headers["user-agent"] = "flwr"  # firewalls may refuse requests that name none
        self._looks: list[float] = []

    def ActivateNode(self, request: Any) -> Any:
        """Activate the node; if the SuperLink refuses, try again after a pause.

        A node that was refused leaves once more when it is let in, and comes back. The SuperLink calls the messages
        that a former process took with it lost when it is asked for their answers while the node is offline, and never
        afterwards: a node that is back between two of the server's looks would have it wait to the end of the round.
        """
        pause = _PAUSE
        while True:
            try:
                answer = super().ActivateNode(request)
                if pause == _PAUSE:
                    return answer
                self.DeactivateNode(DeactivateNodeRequest(node_id=answer.node_id))
                time.sleep(_ABSENCE)
                return super().ActivateNode(request)
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                if refusal is None or refusal.code != ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                    raise
                logger.warning(
                    "Failed to activate SuperNode. Either the SuperLink still takes a former process of this node for "
                    "online, which passes within a minute or two, or it does not know this key: then its operator must "
                    "register it (`flwr supernode register`). Trying again in %.0f s.",
                    pause,
                )
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def PushMessages(self, request: Any) -> Any:
        """Announce an answer, whose parts follow."""
        self._looks = list(_LOOKS)
        return super().PushMessages(request)

    def PullMessages(self, request: Any) -> Any:
        """Look for a message; after an answer, several times."""
        while self._looks:
            time.sleep(self._looks.pop(0))
            found = super().PullMessages(request)
            if found.messages_list or not self._looks:
                return found
        return super().PullMessages(request)


def _pause(seconds: float) -> None:
    time.sleep(_OWN_LOOK if seconds == _ANSWERS else seconds)


def main() -> None:
    """Run `flower-supernode` with the options of this command."""
    from flwr.supernode import fleet_http_connection, start_client_internal

    start_client_internal.time = SimpleNamespace(sleep=_pause)  # type: ignore[assignment]
    fleet_http_connection.FleetHttpClient = PatientClient  # type: ignore[misc]
    sys.argv[0] = "flower-supernode"  # by which Flower knows which of its commands it is
    flower_supernode()


if __name__ == "__main__":
    main()
