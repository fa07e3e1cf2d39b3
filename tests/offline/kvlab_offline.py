"""Blocks every connection that would leave this machine. Loopback stays: kernels need it."""

from __future__ import annotations

import errno
import socket

LOCAL = ("127.", "::1", "localhost", "0.0.0.0")


class Blocked(OSError):
    """A test, or a program it started, asked for the network."""


def _check(address: object) -> None:
    host = address[0] if isinstance(address, tuple) else address
    text = host.decode() if isinstance(host, bytes) else str(host)
    if isinstance(address, tuple) and not text.startswith(LOCAL):
        raise Blocked(errno.ENETUNREACH, f"the tests run with the network blocked: {text}")


def block() -> None:
    """Make connect and name look-up refuse all but local addresses, in this process."""
    if getattr(socket, "kvlab_blocked", False):
        return
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
    look_up = socket.getaddrinfo

    def checked_connect(self, address):
        _check(address)
        return connect(self, address)

    def checked_connect_ex(self, address):
        _check(address)
        return connect_ex(self, address)

    def checked_look_up(host, *arguments, **options):
        if host is not None:
            _check((host,))
        return look_up(host, *arguments, **options)

    socket.socket.connect = checked_connect
    socket.socket.connect_ex = checked_connect_ex
    socket.getaddrinfo = checked_look_up
    socket.kvlab_blocked = True
