"""Has the system refuse single system calls of this process, as a locked-down container does, or end it at one."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from enum import IntEnum

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_PR_SET_DUMPABLE = 4
_CAPABILITY_VERSION, _CAP_SYS_PTRACE = 0x20080522, 19


class Syscall(IntEnum):
    """Numbers of system calls, on the machine that this runs on."""

    MEMFD_CREATE = 319 if platform.machine() == "x86_64" else 279
    FALLOCATE = 285 if platform.machine() == "x86_64" else 47
    UNLINK = 87 if platform.machine() == "x86_64" else 35
    """On other machines than x86_64: unlinkat."""
    PIDFD_OPEN = 434


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse(call: Syscall, error: int) -> None:
    """From now on `call` fails with `error` (of `errno`) in this process and its children."""
    _filter(call, _ERRNO | error)


def end_at(call: Syscall) -> None:
    """From now on `call` ends this process, by SIGSYS."""
    _filter(call, _KILL_PROCESS)


def _filter(call: Syscall, action: int) -> None:
    instructions = ((_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 1, call), (_RETURN, 0, 0, action), (_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def hide_from_peers() -> None:
    """Denies unprivileged processes the files in /proc/<pid>/fd of this process from now on."""
    _prctl(_PR_SET_DUMPABLE, 0)


def drop_privilege_to_look() -> None:
    """Drops CAP_SYS_PTRACE of a root process, which could open every user's files in /proc otherwise."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: twice 32 bits of each
    for call in (libc.capget, None, libc.capset):
        if call is None:
            for index in range(3):
                sets[index] &= ~(1 << _CAP_SYS_PTRACE)
        elif call(ctypes.byref(header), ctypes.byref(sets)) != 0:
            raise OSError(ctypes.get_errno(), f"cannot change capabilities: {errno.errorcode[ctypes.get_errno()]}")


def _prctl(option: int, first: int, second: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {first}): {os.strerror(ctypes.get_errno())}")
