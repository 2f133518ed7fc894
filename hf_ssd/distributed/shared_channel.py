"""The channel to a worker as the target's process holds it: all calls of the draft share it, in any thread."""

import threading
import time
from collections import deque

from ..drafting.request import SessionRequest
from .requests import write_request
from .transport import AWAKE, WAIT_SLICE, Channel, PeerLost
from .wire import Kind, Message


class SharedChannel:
    """Sends whole messages of each session. A single thread of those that wait receives for all of them."""

    def __init__(self, channel: Channel, process):
        self.channel, self.process = channel, process  # a `Child` or a `SupervisedChild`
        self.inboxes: dict[int, deque[Message]] = {}  # of each open session, by its number
        self.changed = threading.Condition()  # the inboxes, who receives, or whether the channel is broken
        self.receiver: int | None = None  # the session whose thread receives
        self.sending = threading.RLock()
        # The worker has failed, or an interrupt has left half a message behind. A channel that a thread uses cannot be
        # closed, so it is closed with the last session.
        self.is_broken = False
        self.translation = None  # which was sent last

    @property
    def is_alive(self) -> bool:
        return not self.is_broken and self.process.is_running

    @property
    def is_shared(self) -> bool:
        return len(self.inboxes) > 1

    def start(self, number: int, request: SessionRequest) -> None:
        """Opens a session. [`~SharedChannel.leave`] must follow."""
        with self.changed:
            self.inboxes[number] = deque()
        values, translation = write_request(request), request.translation
        with self.sending:  # a translation that is kept is that of the call before, in the order of arrival
            self.channel.make_room(len(request.prompts), request.vocab_size)
            if translation is not None and translation is not self.translation:
                values["translation"] = translation.to_tensor()
            self.send(Message(Kind.START, number, payload=values))
            self.translation = translation or self.translation  # not before, because an interrupt may keep it here

    def send(self, message: Message) -> None:
        """Starts to send a message and the payload that it announces. Of a broken channel only `receive` tells."""
        with self.sending:
            if self.is_broken:
                return
            try:
                self.channel.send(message)
                if message.announces is not None:
                    self.channel.send_announced(message.announces.payload)
            except BaseException:
                self.is_broken = True
                raise

    def receive(self, number: int, timeout: float, awake: float = AWAKE) -> Message:
        """Returns the next message for a session. See [`Channel.receive`]; a wait beside other sessions sleeps."""
        deadline, inbox = time.monotonic() + timeout, self.inboxes[number]
        while True:
            with self.changed:
                while not inbox and not self.is_broken and self.receiver is not None and time.monotonic() < deadline:
                    self.changed.wait(min(WAIT_SLICE, deadline - time.monotonic()))
                if inbox:
                    return inbox.popleft()
                if self.is_broken:
                    raise PeerLost("the channel is broken")
                if self.receiver is not None:
                    raise TimeoutError("no message came in time")
                self.receiver = number
            try:
                # A thread that spins would keep Python from the threads of the other sessions.
                self.channel.awake = 0.0 if self.is_shared else awake
                message = self.channel.receive(deadline - time.monotonic())
                with self.changed:  # a worker that could not read a message does not know whose it was
                    is_for_all = message.kind == Kind.ERROR and not message.session
                    for session in list(self.inboxes) if is_for_all else {message.session} & self.inboxes.keys():
                        self.inboxes[session].append(message)
                self.channel.expect()  # the next message may arrive while the target computes
            except BaseException as error:
                self.is_broken |= isinstance(error, PeerLost) or self.channel.pending is None
                raise
            finally:
                with self.changed:
                    self.receiver = None if self.receiver == number else self.receiver
                    self.changed.notify_all()

    def leave(self, number: int, is_reusable: bool) -> None:
        """Ends a session, and the worker if it cannot be used again. May be called more than once."""
        if is_reusable and self.is_alive:
            self.send(Message(Kind.END, number))
        else:
            self.is_broken = True
            self.process.end()  # before the channel is closed, which waits for a process that lives
        with self.changed:
            self.inboxes.pop(number, None)
            is_last = self.is_broken and not self.inboxes
            if self.receiver == number:  # its thread was interrupted
                self.receiver = None
            self.changed.notify_all()
        if is_last:
            self.channel.close()
