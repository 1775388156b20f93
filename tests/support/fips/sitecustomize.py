"""What a Python runs first whose folder this is on PYTHONPATH: it has no other hashes than one in FIPS mode."""

import hashlib
from typing import Any, NoReturn

_new, _md5 = hashlib.new, hashlib.md5
_REFUSED = ("blake2b", "blake2s", "md5")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ValueError("[digital envelope routines] unsupported")


def _md5_for_no_security(data: bytes = b"", *, usedforsecurity: bool = True) -> Any:
    return _refuse() if usedforsecurity else _md5(data, usedforsecurity=False)


def _new_or_refuse(name: str, data: bytes = b"", *, usedforsecurity: bool = True) -> Any:
    if name.lower() in _REFUSED and (usedforsecurity or name.lower() != "md5"):
        _refuse()
    return _new(name, data, usedforsecurity=usedforsecurity)


hashlib.blake2b = hashlib.blake2s = _refuse  # type: ignore[misc, assignment]
hashlib.md5, hashlib.new = _md5_for_no_security, _new_or_refuse  # type: ignore[assignment]
