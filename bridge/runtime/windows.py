"""A program's processes, and who may change a file, by what Windows has for it."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

# Anonymous, all who sign in, Guests, Users, interactive and network sign-ins, Everyone, and all of a domain.
_ANYONE = {"AN", "AU", "BG", "BU", "DU", "IU", "NU", "WD"}
# To write or to add a file, to remove what is in a folder, to remove it, to change who may, and what includes these.
_HARMFUL = {"DC": 0x2, "DT": 0x40, "SD": 0x10000, "WD": 0x40000, "WO": 0x80000, "GA": 1 << 28, "GW": 1 << 30}
_RIGHTS = {**_HARMFUL, "FA": 0x1F01FF, "FW": 0x120116}
_ADD = _RIGHTS["DC"] | _RIGHTS["GW"]  # harmless in an ancestor: C:\ProgramData allows it to all


def grants_change(sddl: str, *, is_ancestor: bool) -> bool:
    """Return whether an access list lets any user change a file or a folder, or what is in it.

    Args:
        sddl: the list, as Windows writes it.
        is_ancestor: whether it is of a folder above the file's own.
    """
    granted = 0
    for flags, rights, who in re.findall(r"\(A;([^;)]*);([^;)]*);[^;)]*;[^;)]*;([^;)]*)", sddl):
        if "IO" in re.findall("..", flags) or not (who in _ANYONE or re.fullmatch("S-1-5-21-.*-513", who)):
            continue  # only for what will be made in it, or for some users
        named = [int(rights, 16)] if rights[:2] == "0x" else map(_RIGHTS.get, re.findall("..", rights))
        for right in filter(None, named):
            granted |= right
    harmful = sum(_HARMFUL.values()) & ~(_ADD if is_ancestor else 0)
    return bool(granted & harmful) or "D:" not in sddl or "NO_ACCESS_CONTROL" in sddl


if sys.platform == "win32":
    import ctypes
    import os
    from ctypes import wintypes

    CREATE_SUSPENDED = 0x4
    KILL_ON_CLOSE = struct.pack("16xI124x", 0x2000)  # a JOBOBJECT_EXTENDED_LIMIT_INFORMATION
    EXTENDED_LIMITS = 9
    FILE, DACL, REVISION = 1, 4, 1
    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    _ntdll, _advapi32 = ctypes.WinDLL("ntdll"), ctypes.WinDLL("advapi32")
    _kernel32.CreateJobObjectW.restype = wintypes.HANDLE

    APART: dict[str, Any] = {
        "cwd": os.environ["SYSTEMROOT"],
        "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | CREATE_SUSPENDED,
    }
    """How a program is started that is to be the first of a group."""

    class Group:
        """A program in a job, whose processes end with it and at the latest with this process."""

        def __init__(self, process: subprocess.Popen[bytes]) -> None:
            """Put the program into its job, and let it run; OSError if that fails."""
            self.process = process
            self._job = wintypes.HANDLE(_kernel32.CreateJobObjectW(None, None))
            _kernel32.SetInformationJobObject(self._job, EXTENDED_LIMITS, KILL_ON_CLOSE, len(KILL_ON_CLOSE))
            handle = wintypes.HANDLE(int(self.process._handle))  # type: ignore[attr-defined]
            if not _kernel32.AssignProcessToJobObject(self._job, handle):
                error = ctypes.WinError(ctypes.get_last_error())
                with self.process:
                    self.process.kill()
                self.close()
                raise error
            _ntdll.NtResumeProcess(handle)  # before this, it has not run: no process of it is outside the job

        def ask(self) -> None:
            """Ask every process to end."""
            send_break(self.process.pid)

        def end(self) -> None:
            """End every process."""
            _kernel32.TerminateJobObject(self._job, 1)

        def close(self) -> None:
            """End what is left."""
            _kernel32.CloseHandle(self._job)

    def send_break(pid: int) -> bool:
        """Send Ctrl-Break to a process group if there is a console, without which os.kill would end the process."""
        return bool(_kernel32.GenerateConsoleCtrlEvent(1, pid))

    def may_anyone_change(path: Path, *, is_ancestor: bool) -> bool:
        """Return whether any user may write a file, or replace it or what it loads in its folder."""
        descriptor, text = ctypes.c_void_p(), wintypes.LPWSTR()
        if error := _advapi32.GetNamedSecurityInfoW(
            str(path), FILE, DACL, None, None, None, None, ctypes.byref(descriptor)
        ):
            raise ctypes.WinError(error)
        _advapi32.ConvertSecurityDescriptorToStringSecurityDescriptorW(
            descriptor, REVISION, DACL, ctypes.byref(text), None
        )
        sddl = text.value or ""
        _kernel32.LocalFree(text)
        _kernel32.LocalFree(descriptor)
        return grants_change(sddl, is_ancestor=is_ancestor)
