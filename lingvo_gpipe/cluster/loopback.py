"""Keeps other machines away from a port that TensorFlow listens at.

TensorFlow's server takes connections from everywhere, whatever its address
says, and asks nobody who they are. On Linux a socket can be given a filter of
packets, so that those from other machines are dropped before they arrive.
"""

import ctypes
import os
import socket
import struct

# From linux/filter.h and asm-generic/socket.h.
_SO_ATTACH_FILTER = 26
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_AND, _JUMP_IF_EQUAL, _RETURN = 0x54, 0x15, 0x06
# Offsets into the network header.
_NETWORK = -0x100000 & 0xFFFFFFFF
_IPV4_SOURCE, _IPV6_SOURCE = _NETWORK + 12, _NETWORK + 8
_ALL, _NOTHING = 0xFFFFFFFF, 0

# (code, jump if true, jump if false, value); jumps count from the next line.
_FROM_LOOPBACK = (
  (_LOAD_BYTE, 0, 0, _NETWORK),
  (_AND, 0, 0, 0xF0),
  (_JUMP_IF_EQUAL, 0, 2, 0x40),
  (_LOAD_BYTE, 0, 0, _IPV4_SOURCE),
  (_JUMP_IF_EQUAL, 8, 9, 127),
  (_LOAD_WORD, 0, 0, _IPV6_SOURCE),
  (_JUMP_IF_EQUAL, 0, 7, 0),
  (_LOAD_WORD, 0, 0, _IPV6_SOURCE + 4),
  (_JUMP_IF_EQUAL, 0, 5, 0),
  (_LOAD_WORD, 0, 0, _IPV6_SOURCE + 8),
  (_JUMP_IF_EQUAL, 0, 3, 0),
  (_LOAD_WORD, 0, 0, _IPV6_SOURCE + 12),
  (_JUMP_IF_EQUAL, 0, 1, 1),
  (_RETURN, 0, 0, _ALL),
  (_RETURN, 0, 0, _NOTHING),
)


def restrict(port: int) -> None:
  """Lets this process's listeners at `port` hear this machine alone.

  Raises:
    OSError: the system has no such filters, or nobody listens there.
  """
  program = b''.join(struct.pack('HBBI', *line) for line in _FROM_LOOPBACK)
  # The kernel copies the program before setsockopt returns.
  buffer = _address_of(program)
  found = False
  for listener in _listeners(port):
    found = True
    with listener:
      listener.setsockopt(
        socket.SOL_SOCKET,
        _SO_ATTACH_FILTER,
        struct.pack('HL', len(_FROM_LOOPBACK), buffer),
      )
  if not found:
    raise OSError(f'this process does not listen at port {port}')


def _listeners(port):
  """Yields a duplicate of each socket of this process that listens there."""
  for name in os.listdir('/proc/self/fd'):
    try:
      if not os.readlink(f'/proc/self/fd/{name}').startswith('socket:'):
        continue
      found = socket.socket(fileno=os.dup(int(name)))
    except OSError:
      continue
    if (
      found.family in (socket.AF_INET, socket.AF_INET6)
      and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
      and found.getsockname()[1] == port
    ):
      yield found
    else:
      found.close()


def _address_of(data: bytes) -> int:
  return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
