"""What Windows' Python runs first: Wine 8 refuses a lock without saying why, where Windows says EACCES."""

import sys

if sys.platform == "win32":
    import errno
    import msvcrt

    _locking = msvcrt.locking

    def locking(descriptor: int, mode: int, length: int) -> None:
        """Lock as Windows does."""
        try:
            _locking(descriptor, mode, length)
        except OSError as error:
            raise OSError(error.errno or errno.EACCES, "Permission denied") from None

    msvcrt.locking = locking
