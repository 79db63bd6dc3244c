"""Reader of pickles, protocols 0 to 5, that only builds descriptions.

It is the standard library's unpickler in Python, without everything in it that imports, calls or
sets an attribute. A call becomes a description made by our own functions, from the table that the
caller gives; any other name becomes an `Unknown`. Only operations in `_COSTS` are known.
tests/interop/hostile opens malicious files under limits.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeAlias

from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, HoldfastError, LimitExceeded
from holdfast.format.nodes import DtypeName
from holdfast.interop.pickles.values import (
    LIFTED,
    MAX_INT_NBYTES,
    MAX_KEY_VALUES,
    MAX_LEAF_NBYTES,
    MAX_NAME,
    MAX_OTHER_KEYS,
    SPAN_NBYTES,
    ByteArray,
    Global,
    OrderedItems,
    PickleBudget,
    PickledObject,
    Span,
    Unknown,
)

Constructor: TypeAlias = Callable[["Machine", "Args"], Any]
"""Makes a description from the arguments of a call. Raises ValueError for wrong arguments."""
Setter: TypeAlias = Callable[["Machine", Any, Any], None]
"""Gives a description the state that a pickle restores. Raises ValueError for a wrong one."""
Args: TypeAlias = tuple[Any, ...]

_MALFORMED = (
    *(ValueError, IndexError, TypeError, OverflowError, AttributeError, struct.error),
    pickle.UnpicklingError,
)
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_BOOLEANS = {b"00": False, b"01": True}
_MISSING: Any = object()
_MAX_LINE = 1 << 20
_SMALL = 2**60  # hashes of smaller integers are all different


class Machine(pickle._Unpickler):
    """Reads pickles from a file, one at each `read_pickle`.

    `constructors` are by name; `constants` are descriptions of names that are values, such as
    dtypes. `setters` are by class of description. Calls of a name in `records` become
    `PickledObject`. `persistent` gives the description of a persistent id.
    """

    # Attributes of the standard library's class.
    stack: list[Any]
    metastack: list[list[Any]]
    memo: _Memo
    append: Callable[[Any], None]

    def __init__(
        self,
        file: io.BufferedIOBase,
        *,
        what: str,
        budget: PickleBudget,
        constructors: Mapping[str, Constructor],
        constants: Mapping[str, Any],
        setters: Mapping[type, Setter],
        records: Collection[str] = (),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.what = what
        self.budget = budget
        self.charge = budget.charge
        self._file = file
        self._constructors = constructors
        self._constants = constants
        self._setters = setters
        self._records = frozenset(records)
        self._persistent = persistent
        self._globals: dict[str, Any] = {}
        self._num_other_keys = 0

    def read_pickle(self) -> Any:
        """Read one pickle and return its description; raises if malformed or too large."""
        self.stack, self.metastack, self.memo = [], [], _Memo()
        self.append = self.stack.append
        position = self._file.tell()
        try:
            return self._run_operations()
        except HoldfastError as err:
            raise type(err)(f"{self.what}: {err}") from err
        except _MALFORMED as err:
            raise FormatError(
                f"{self.what}: not a valid pickle at byte {position:,}: {str(err)[:200]}"
            ) from err

    def _run_operations(self) -> Any:
        read, charge, operations = self._file.read, self.charge, _OPERATIONS
        left = self.budget.operations
        try:
            while True:
                code = read(1)
                if code == pickle.STOP:
                    return self.stack.pop()
                left -= 1
                if left < 0:
                    raise LimitExceeded(
                        f"has more operations than a pickle may have here; {LIFTED}"
                    )
                operation, cost = operations.get(code) or self._unknown(code)
                if cost:
                    charge(cost)
                operation(self)
        finally:
            self.budget.operations = left

    def _unknown(self, code: bytes) -> NoReturn:
        if not code:
            raise CorruptData("the pickle ends before its last operation; the file is cut short")
        raise FormatError(_REFUSED.get(code, f"the byte {code.hex()} is no operation of a pickle"))

    # Bytes of the file.

    def read(self, count: int) -> bytes:
        """Read a number or a text; texts are charged for, which may have 4 bytes a character."""
        if count > MAX_LEAF_NBYTES:
            raise LimitExceeded(
                f"a value of {count:,} bytes; at most {MAX_LEAF_NBYTES:,} are allowed"
            )
        data = self._read_exactly(count)
        if count > 8:
            self.charge(2 * count if data.isascii() else 5 * count)
        return data

    def _read_exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise CorruptData("the pickle ends inside a value; the file is cut short")
        return data

    def readline(self) -> bytes:
        """Read a line, which is charged for."""
        line = self._file.readline(_MAX_LINE)
        if line[-1:] != b"\n":
            raise CorruptData("the pickle ends inside a line, or has a line that is too long")
        self.charge(len(line) if len(line) < 40 else 5 * len(line))
        return line

    def pop_mark(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        items = self.stack
        self.stack = self.metastack.pop()
        self.append = self.stack.append
        self.charge(10 * len(items))
        return items

    # What calls and states become.

    def describe_call(self, callee: Any, args: Any) -> Any:
        """Make the description of a call; nothing is called but our own constructors."""
        if type(args) is not tuple:
            raise FormatError("calls something without a tuple of arguments")
        self.charge(80)
        if type(callee) is Global:
            construct = self._constructors.get(callee.name)
            if construct is not None:
                try:
                    return construct(self, args)
                except _MALFORMED as err:
                    raise FormatError(f"{callee.name}: wrong arguments: {str(err)[:200]}") from err
            kind = PickledObject if callee.name in self._records else Unknown
            return kind(callee.name, args)
        if isinstance(callee, Unknown):
            return Unknown(callee.name, args)
        return Unknown(f"a call of {type(callee).__name__}", args)

    @override
    def find_class(self, module: str, name: str) -> Any:
        """Return the description of a name; nothing is imported."""
        if len(module) > MAX_NAME or len(name) > MAX_NAME or not (module + name).isprintable():
            raise FormatError("a global whose name is too long or not printable")
        module = _OLD_MODULES.get(module, module)
        if module.startswith("numpy.core."):  # its name before numpy 2
            module = f"numpy._core.{module[11:]}"
        full = f"{module}.{name}"
        found = self._globals.get(full)
        if found is None:
            self.charge(300)
            found = self._constants.get(full) or Global(full)
            self._globals[full] = found
        return found

    @override
    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise FormatError("refers to an object outside of the pickle, by a persistent id")
        return self._persistent(pid)

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.append(self.describe_call(klass, tuple(args)))

    def _decode_string(self, value: bytes) -> str | bytes:
        """Decode the `str` of Python 2: text where it is UTF-8, else bytes."""
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value

    # Operations that the standard library would not check, or would carry out.

    def _load_frame(self) -> None:
        self.read(8)

    def _load_int(self) -> None:
        digits = self.readline()[:-1].removesuffix(b"L")
        if len(digits) > 4097:
            raise LimitExceeded("an integer of more than 4,096 digits")
        self.charge(8 * len(digits))  # conversion takes quadratic time
        value = _BOOLEANS.get(digits)
        self.append(int(digits) if value is None else value)

    _load_long = _load_int

    def _load_long4(self) -> None:
        count = int.from_bytes(self.read(4), "little")
        if count > MAX_INT_NBYTES:
            raise LimitExceeded(
                f"an integer of {count:,} bytes; at most {MAX_INT_NBYTES:,} are allowed"
            )
        self.charge(8 * count)  # writing it as text takes quadratic time
        self.append(pickle.decode_long(self.read(count)))

    def _load_float(self) -> None:
        line = self.readline()
        if len(line) > 400:  # longer than any that Python writes
            raise LimitExceeded("a number of more than 400 characters")
        self.append(float(line))

    def _load_short_binbytes(self) -> None:
        self._push_bytes(1)

    def _load_binbytes(self) -> None:
        self._push_bytes(4)

    def _load_binbytes8(self) -> None:
        self._push_bytes(8)

    def _load_bytearray8(self) -> None:
        self._push_bytes(8, is_mutable=True)

    def _push_bytes(self, count_nbytes: int, *, is_mutable: bool = False) -> None:
        """Push bytes; many of them stay in the file."""
        count = int.from_bytes(self.read(count_nbytes), "little")
        if count <= SPAN_NBYTES:
            self.charge(count)
            data = self._read_exactly(count)
            self.append(ByteArray(data) if is_mutable else data)
            return
        start = self._file.tell()
        self._file.seek(count - 1, io.SEEK_CUR)
        self.read(1)
        self.append(Span(start, count, is_mutable))

    def _load_put(self) -> None:
        self.memo[int(self.readline()[:20])] = self.stack[-1]

    def _load_get(self) -> None:
        self.append(self.memo[int(self.readline()[:20])])

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _load_setitem(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def _load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unknown):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise FormatError(f"sets items of a {type(target).__name__}")
        keys = self.checked_keys(items[::2], cost=110)
        target.update(zip(keys, items[1::2], strict=True))

    def _load_append(self) -> None:
        self._extend([self.stack.pop()])

    def _load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target += items
        elif not isinstance(target, Unknown):
            raise FormatError(f"appends to a {type(target).__name__}")

    def _load_frozenset(self) -> None:
        items = self.pop_mark()  # which replaces the stack, and `append`
        self.append(frozenset(self.checked_keys(items, cost=120)))

    def _load_additems(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is set:
            target.update(self.checked_keys(items, cost=120))
        elif not isinstance(target, Unknown):
            raise FormatError(f"adds members to a {type(target).__name__}")

    def checked_keys(self, keys: list[Any], *, cost: int) -> list[Any]:
        """Charge for keys of a dict or members of a set, and check that hashing them is fast."""
        self.charge(cost * len(keys))
        for key in keys:
            kind = type(key)
            if kind is str or kind is PickledObject or (kind is int and -_SMALL < key < _SMALL):
                continue  # a record is hashed by what it is, not by what it holds
            self._num_other_keys += 1
            if self._num_other_keys > MAX_OTHER_KEYS:
                raise LimitExceeded(
                    f"has more than {MAX_OTHER_KEYS:,} keys that are neither text nor small numbers"
                )
            _check_key(key, MAX_KEY_VALUES)
        return keys

    def _load_reduce(self) -> None:
        args = self.stack.pop()
        self.append(self.describe_call(self.stack.pop(), args))

    _load_newobj = _load_reduce  # of a class and a tuple, which is all that a call is here

    def _load_newobj_ex(self) -> None:
        named = self.stack.pop()
        args = self.stack.pop()
        callee = self.stack.pop()
        if not isinstance(named, dict):
            raise FormatError("makes an object whose keyword arguments are not a dict")
        if named:
            name = callee.name if isinstance(callee, Global) else type(callee).__name__
            self.append(Unknown(name, (args, named)))
        else:
            self.append(self.describe_call(callee, args))

    def _load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Unknown):
            target.state = state
        elif type(target) is OrderedItems:
            target.attributes = state
        elif type(target) in self._setters:
            try:
                self._setters[type(target)](self, target, state)
            except _MALFORMED as err:
                raise FormatError(
                    f"{type(target).__name__}: a wrong state: {str(err)[:200]}"
                ) from err
        else:
            raise FormatError(f"sets the state of a {_name_type(target)}")


class _Memo(list[Any]):
    """Values that are remembered. Picklers number them in order, Python 2 from 1 on."""

    @override
    def __setitem__(self, place: Any, value: Any) -> None:
        if not 0 <= place <= len(self) + 1:
            raise FormatError(f"stores a value as number {place:,} after {len(self):,} values")
        if place > len(self):
            self.append(_MISSING)
        if place == len(self):
            self.append(value)
        else:
            super().__setitem__(place, value)

    @override
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place) if 0 <= place < len(self) else _MISSING
        if found is _MISSING:
            raise FormatError(f"refers to value {place:,}, which it has not stored")
        return found


def _check_key(key: Any, room: int) -> int:
    """Check that a value can be a key and is quickly hashed; return the room that it leaves."""
    if room <= 0:
        raise LimitExceeded(f"a key of more than {MAX_KEY_VALUES} values")
    if isinstance(key, list | dict | set | ByteArray | Span):
        raise FormatError(f"a {type(key).__name__} as a key")
    room -= 1
    if isinstance(key, tuple | frozenset):
        for item in key:
            room = _check_key(item, room)
    return room


def _name_type(value: Any) -> str:
    return f"name ({value.name})" if isinstance(value, Global | DtypeName) else type(value).__name__


_COSTS: Mapping[int, int] = {
    **dict.fromkeys(b"\x80\x95012N\x88\x89K)esu\x90pqr\x94ghjc\x93bPQR\x81", 0),
    **dict.fromkeys(b"aILJM\x8a\x8bFG", 32),
    **dict.fromkeys(b"TUX\x8c\x8d", 90),
    **dict.fromkeys(b"t\x85\x86\x87io", 64),
    **dict.fromkeys(b"(]l}d\x92", 88),
    **dict.fromkeys(b"BC\x8e\x96", 120),
    **dict.fromkeys(b"SV\x8f\x91", 250),
}
"""Operations that are known → memory that each takes, without its items and the bytes of texts."""
_OPERATIONS: dict[bytes, tuple[Callable[[Machine], None], int]] = {
    bytes([code]): (getattr(Machine, f"_{name}", None) or getattr(Machine, name), cost)
    for code, cost in _COSTS.items()
    for name in [pickle._Unpickler.dispatch[code].__name__]
}
_EXTENSION = "uses copyreg's extension registry, which stands for names that are not in the file"
_REFUSED: dict[bytes, str] = {
    b"\x82": _EXTENSION,
    b"\x83": _EXTENSION,
    b"\x84": _EXTENSION,
    b"\x97": "refers to a buffer outside of the pickle",
    b"\x98": "refers to a buffer outside of the pickle",
}
