"""The two threads of a connection: an outbox that sends, and a listener that serves whoever knows the run's token."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from hf_distca.pool.messages import Message
from hf_distca.pool.wire import Channel, LinkLost, MismatchError, PeerLeft, ProtocolError

logger = logging.getLogger(__name__)

HANDSHAKES = 64
"""Most handshakes at once; one more ends the oldest, which a peer that knows the token has long finished."""

_TICK_S = 0.2


class Outbox:
    """Sends messages in order on its own thread, so that nobody waits for a slow connection.

    A send that fails ends the connection, and what is queued behind it is dropped.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send {channel.name}", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        """Queue a function that sends."""
        self._queue.put(send)

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, for so long at most; then end the connection and the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._channel.shut_down()
        self._thread.join()

    def _run(self) -> None:
        lost = False
        while (send := self._queue.get()) is not None:
            try:
                if not lost:
                    send()
            except LinkLost as error:
                lost = True
                self._channel.shut_down(str(error))
            del send  # nothing is kept while the queue is empty


class Listener:
    """Accepts connections and gives each a thread, which serves a peer that has proved to know the token.

    Strangers cost at most HANDSHAKES threads for `handshake_s` each. Nothing that a peer sends ends the listener.

    Args:
        port: 0 for any that is free.
        serve: called on the peer's thread with the connection, which is closed afterwards, and its first message.
            The listener logs LinkLost, and sends a ProtocolError's text to the peer; a MismatchError is only sent.
        handshake_s: time that a peer has for the handshake, and again for its first message.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        service: str,
        serve: Callable[[Channel, Message], None],
        handshake_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        self._socket.settimeout(_TICK_S)
        self.host, self.port = self._socket.getsockname()[:2]
        self._token, self._service, self._serve, self._handshake_s = token, service, serve, handshake_s
        self._warnings = 0
        self._lock = threading.Lock()
        self._peers: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}  # in the handshake, oldest first
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name=f"listen {self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end all connections, and wait for the peers' threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # on Linux this ends `accept`
        self._thread.join()
        with self._lock:
            peers = dict(self._peers)
        for channel, thread in peers.items():
            channel.shut_down()
            thread.join()

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                sock = self._socket.accept()[0]
                try:
                    self._accept(sock)
                except BaseException:
                    sock.close()
                    raise
            except TimeoutError:
                pass
            except (OSError, RuntimeError) as error:  # also when there are no more file descriptors or threads
                if not self._closed:
                    self._warn(f"a connection could not be accepted: {error}")
                    time.sleep(0.01)
        self._socket.close()

    def _accept(self, sock: socket.socket) -> None:
        channel = Channel(sock)
        thread = threading.Thread(target=self._meet, args=(channel,), name=f"peer {channel.name}", daemon=True)
        with self._lock:
            if len(self._strangers) >= HANDSHAKES:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.shut_down("too many handshakes at once")
            thread.start()  # the thread waits for the lock before it ends
            self._peers[channel] = thread
            self._strangers[channel] = None

    def _meet(self, channel: Channel) -> None:
        """Serve one peer in its thread."""
        proved = False
        try:
            channel.prove(self._token, self._service, self._handshake_s, connects=False)
            proved = True
            with self._lock:
                self._strangers.pop(channel, None)
            self._serve(channel, channel.receive(self._handshake_s)[0])
        except PeerLeft:  # checks of open ports do so
            logger.info("%s left", channel.name)
        except LinkLost as error:
            if not self._closed and not isinstance(error, MismatchError):  # the peer knows what to do
                self._warn(f"{'ended' if proved else 'refused'} {channel.name}: {error}")
            if proved and isinstance(error, ProtocolError):
                with contextlib.suppress(LinkLost):
                    channel.refuse(str(error), self._handshake_s)
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
                del self._peers[channel]
            channel.close()

    def _warn(self, message: str) -> None:
        """Log a refusal; of many the first ten, and then one whenever their number has doubled."""
        with self._lock:
            self._warnings += 1
            count = self._warnings
        if count <= 10:
            logger.warning("%s", message)
        elif count & (count - 1) == 0:
            logger.warning("%d refusals so far, the latest: %s", count, message)
