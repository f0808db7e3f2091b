"""Counts the threads of a program in the sandbox, from outside it.

The kernel counts them against no limit that holds here: root is exempt, and a thread without a stack of its own takes
no memory of the program's. So the sandbox's filter stops every call that would start one until this process has
answered.
"""

import fcntl
import os
import select
import socket
import struct
import time
from contextlib import suppress

MAX_THREADS = 128
"""Of one program at a time. A program may have up to twice as many: each of its threads can ask before the others that
were granted have begun."""
RECEIVE, ANSWER = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
QUESTION = struct.Struct("=QII64x")  # struct seccomp_notif: id, thread, flags, the call
REPLY = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
TRY_AGAIN = -11  # EAGAIN, as the kernel says where no thread can be had


def wait_and_answer(life: int, limit_s: float, launcher: socket.socket) -> None:
    """Until the process of that pidfd has ended or the time is up. `launcher` sends the descriptor of questions."""
    end = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(life, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    questions: Questions | None = None
    try:
        while (left_s := end - time.monotonic()) > 0:
            for descriptor, event in poll.poll(left_s * 1000):
                if descriptor == life:
                    return
                if descriptor == launcher.fileno():
                    poll.unregister(launcher)
                    questions = _questions(launcher)
                    if questions is not None:
                        poll.register(questions.descriptor, select.POLLIN)
                elif questions is not None and event & select.POLLIN:
                    questions.answer()
                else:  # nobody is left to ask
                    poll.unregister(descriptor)
    finally:
        if questions is not None:
            os.close(questions.descriptor)


def _questions(launcher: socket.socket) -> "Questions | None":
    """None: the launcher has none to hand out, or it died."""
    try:
        _, descriptors, _, _ = socket.recv_fds(launcher, 16, 1, socket.MSG_DONTWAIT)
    except OSError:
        return None
    return Questions(descriptors[0]) if descriptors else None


class Questions:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._granted = 0

    def answer(self) -> None:
        """One question. A program that is killed meanwhile needs no answer."""
        with suppress(FileNotFoundError):
            question = fcntl.ioctl(self.descriptor, RECEIVE, bytes(QUESTION.size))
            number, thread, _ = QUESTION.unpack(question)
            is_granted = self._num_threads(thread) < MAX_THREADS
            self._granted += is_granted
            reply = (number, 0, 0, GO_ON) if is_granted else (number, 0, TRY_AGAIN, 0)
            fcntl.ioctl(self.descriptor, ANSWER, REPLY.pack(*reply))

    def _num_threads(self, thread: int) -> int:
        """Of the process that asks; where /proc hides it, all that it was ever granted."""
        try:
            return len(os.listdir(f"/proc/{thread}/task"))
        except OSError:
            return self._granted
