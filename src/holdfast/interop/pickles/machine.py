"""Interpreter of the operations of pickles, protocols 0 to 5, that only builds descriptions.

It imports nothing and calls nothing that a pickle names. What stands for a call is made by our own
functions, from the table that the caller gives; any other name becomes an `Unknown`.
"""

from __future__ import annotations

import codecs
import io
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeAlias

from holdfast.errors import CorruptData, FormatError, HoldfastError, LimitExceeded
from holdfast.format.nodes import DtypeName
from holdfast.interop.pickles.budget import (
    LIFTED,
    MAX_INT_NBYTES,
    MAX_KEY_VALUES,
    MAX_LEAF_NBYTES,
    MAX_NAME,
    MAX_OTHER_KEYS,
    SPAN_NBYTES,
    PickleBudget,
)
from holdfast.interop.pickles.values import (
    ByteArray,
    Global,
    OrderedItems,
    PickledObject,
    Span,
    Unknown,
)

Constructor: TypeAlias = Callable[["Machine", tuple[Any, ...]], Any]
"""Makes a description from the arguments of a call. Raises ValueError for wrong arguments."""
Setter: TypeAlias = Callable[["Machine", Any, Any], None]
"""Gives a description the state that a pickle restores. Raises ValueError for a wrong one."""

HIGHEST_PROTOCOL = 5
_MALFORMED = (ValueError, IndexError, TypeError, OverflowError, AttributeError, struct.error)
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_MISSING: Any = object()
_MAX_LINE = 1 << 20


class Machine:
    """Reads pickles from a file, one at each `read_pickle`.

    `constructors` are by name; `constants` are descriptions of names that are values, such as
    dtypes. `setters` are by class of description. Calls of a name in `records` become
    `PickledObject`. `persistent` gives the description of a persistent id.
    """

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
        self._read = file.read
        self._constructors = constructors
        self._constants = constants
        self._setters = setters
        self._records = frozenset(records)
        self._persistent = persistent
        self._globals: dict[str, Any] = {}
        self._num_other_keys = 0
        self._clear_stack()

    def _clear_stack(self) -> None:
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []

    def read_pickle(self) -> Any:
        """Read one pickle and return the description of its value.

        Raises:
            FormatError: malformed, or it does what no description can be made of.
            CorruptData: the file ends inside it.
            LimitExceeded: it costs more memory or work than it may.
        """
        self._clear_stack()
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
        read, operations = self._read, _OPERATIONS
        left = self.budget.operations
        try:
            while True:
                code = read(1)
                if code == b".":
                    return self._stack.pop()
                left -= 1
                if left < 0:
                    raise LimitExceeded(
                        f"has more operations than a pickle may have here; {LIFTED}"
                    )
                operation = operations.get(code)
                if operation is None:
                    self._unknown(code)
                operation(self)
        finally:
            self.budget.operations = left

    def _unknown(self, code: bytes) -> NoReturn:
        if not code:
            raise CorruptData("the pickle ends before its last operation; the file is cut short")
        raise FormatError(_REFUSED.get(code, f"the byte {code.hex()} is no operation of a pickle"))

    # Bytes of the file.

    def _read_exactly(self, count: int) -> bytes:
        data = self._read(count)
        if len(data) != count:
            raise CorruptData("the pickle ends inside a value; the file is cut short")
        return data

    def _read_integer(self, count: int) -> int:
        return int.from_bytes(self._read_exactly(count), "little")

    def _line(self) -> bytes:
        line = self._file.readline(_MAX_LINE)
        if line[-1:] != b"\n":
            raise CorruptData("the pickle ends inside a line, or has a line that is too long")
        self.charge(len(line))
        return line[:-1]

    def _leaf(self, count: int) -> bytes:
        if count > MAX_LEAF_NBYTES:
            raise LimitExceeded(f"a value of {count:,} bytes; at most {MAX_LEAF_NBYTES:,} may be")
        self.charge(count + 40)
        return self._read_exactly(count)

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

    def _global(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise FormatError("a global whose name is not text")
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

    def _pop_to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    # Operations.

    def _op_proto(self) -> None:
        version = self._read_integer(1)
        if version > HIGHEST_PROTOCOL:
            raise FormatError(f"protocol {version}; at most {HIGHEST_PROTOCOL} is known")

    def _op_frame(self) -> None:
        self._read_exactly(8)

    def _op_mark(self) -> None:
        self.charge(88)
        self._below.append(self._stack)
        self._stack = []

    def _op_pop(self) -> None:
        if self._stack:
            del self._stack[-1]
        else:
            self._pop_to_mark()

    def _op_pop_mark(self) -> None:
        self._pop_to_mark()

    def _op_dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _op_none(self) -> None:
        self._stack.append(None)

    def _op_true(self) -> None:
        self._stack.append(True)

    def _op_false(self) -> None:
        self._stack.append(False)

    def _op_int(self) -> None:
        line = self._line()
        self._stack.append({b"00": False, b"01": True}.get(line, _MISSING))
        if self._stack[-1] is _MISSING:
            self._stack[-1] = self._decimal(line)

    def _op_long(self) -> None:
        line = self._line()
        self._stack.append(self._decimal(line.removesuffix(b"L")))

    def _decimal(self, digits: bytes) -> int:
        if len(digits) > 4097:
            raise LimitExceeded("an integer of more than 4,096 digits")
        self.charge(32 + 8 * len(digits))  # conversion takes quadratic time
        return int(digits)

    def _op_binint(self) -> None:
        self.charge(32)
        self._stack.append(int.from_bytes(self._read_exactly(4), "little", signed=True))

    def _op_binint1(self) -> None:
        self._stack.append(self._read_exactly(1)[0])

    def _op_binint2(self) -> None:
        self.charge(32)
        self._stack.append(self._read_integer(2))

    def _op_long1(self) -> None:
        self._long(self._read_integer(1))

    def _op_long4(self) -> None:
        self._long(self._read_integer(4))

    def _long(self, count: int) -> None:
        if count > MAX_INT_NBYTES:
            raise LimitExceeded(f"an integer of {count:,} bytes; at most {MAX_INT_NBYTES:,} may be")
        self.charge(32 + 8 * count)  # writing it as text takes quadratic time
        self._stack.append(int.from_bytes(self._read_exactly(count), "little", signed=True))

    def _op_float(self) -> None:
        line = self._line()
        if len(line) > 400:  # longer than any that Python writes
            raise LimitExceeded("a number of more than 400 characters")
        self._stack.append(float(line))

    def _op_binfloat(self) -> None:
        self.charge(24)
        self._stack.append(struct.unpack(">d", self._read_exactly(8))[0])

    def _op_string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] not in (b'"', b"'") or line[-1:] != line[:1]:
            raise FormatError("a text without quotes")
        raw, _ = codecs.escape_decode(line[1:-1])
        self._push_python2(raw)

    def _op_binstring(self) -> None:
        self._push_python2(self._leaf(self._read_integer(4)))

    def _op_short_binstring(self) -> None:
        self._push_python2(self._leaf(self._read_integer(1)))

    def _push_python2(self, raw: bytes) -> None:
        """Push the `str` of Python 2: text where it is UTF-8, else bytes."""
        try:
            self._push_text(raw.decode("utf-8"))
        except UnicodeDecodeError:
            self._stack.append(raw)

    def _push_text(self, text: str) -> None:
        self.charge(sys.getsizeof(text))
        self._stack.append(text)

    def _op_unicode(self) -> None:
        self._push_text(str(self._line(), "raw-unicode-escape"))

    def _op_binunicode(self) -> None:
        self._push_decoded(self._read_integer(4))

    def _op_short_binunicode(self) -> None:
        self._push_decoded(self._read_integer(1))

    def _op_binunicode8(self) -> None:
        self._push_decoded(self._read_integer(8))

    def _push_decoded(self, count: int) -> None:
        self._push_text(str(self._leaf(count), "utf-8", "surrogatepass"))

    def _op_binbytes(self) -> None:
        self._bytes(self._read_integer(4))

    def _op_short_binbytes(self) -> None:
        self._bytes(self._read_integer(1))

    def _op_binbytes8(self) -> None:
        self._bytes(self._read_integer(8))

    def _bytes(self, count: int) -> None:
        if count <= SPAN_NBYTES:
            self._stack.append(self._leaf(count))
        else:
            self._stack.append(self._skip_span(count, is_mutable=False))

    def _op_bytearray8(self) -> None:
        count = self._read_integer(8)
        if count <= SPAN_NBYTES:
            self._stack.append(ByteArray(self._leaf(count)))
        else:
            self._stack.append(self._skip_span(count, is_mutable=True))

    def _skip_span(self, count: int, *, is_mutable: bool) -> Span:
        self.charge(120)
        start = self._file.tell()
        self._file.seek(count - 1, io.SEEK_CUR)
        self._read_exactly(1)
        return Span(start, count, is_mutable)

    def _op_empty_list(self) -> None:
        self.charge(80)
        self._stack.append([])

    def _op_empty_tuple(self) -> None:
        self._stack.append(())

    def _op_empty_dict(self) -> None:
        self.charge(96)
        self._stack.append({})

    def _op_empty_set(self) -> None:
        self.charge(232)
        self._stack.append(set())

    def _op_list(self) -> None:
        items = self._pop_to_mark()
        self.charge(80 + 10 * len(items))
        self._stack.append(items)

    def _op_tuple(self) -> None:
        self._tuple(self._pop_to_mark())

    def _op_tuple1(self) -> None:
        self._tuple([self._stack.pop()])

    def _op_tuple2(self) -> None:
        items = self._stack[-2:]
        del self._stack[-2:]
        self._tuple(items, 2)

    def _op_tuple3(self) -> None:
        items = self._stack[-3:]
        del self._stack[-3:]
        self._tuple(items, 3)

    def _tuple(self, items: list[Any], count: int | None = None) -> None:
        if count is not None and len(items) != count:
            raise FormatError("a tuple without items")
        self.charge(56 + 8 * len(items))
        self._stack.append(tuple(items))

    def _op_dict(self) -> None:
        items = self._pop_to_mark()
        self.charge(96)
        self._stack.append({})
        self._set_items(items)

    def _op_frozenset(self) -> None:
        items = self.checked_keys(self._pop_to_mark(), cost=120)
        self._stack.append(frozenset(items))

    def _op_append(self) -> None:
        self._append([self._stack.pop()])

    def _op_appends(self) -> None:
        self._append(self._pop_to_mark())

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            self.charge(10 * len(items))
            target += items
        elif not isinstance(target, Unknown):
            raise FormatError(f"appends to a {type(target).__name__}")

    def _op_setitem(self) -> None:
        value = self._stack.pop()
        self._set_items([self._stack.pop(), value])

    def _op_setitems(self) -> None:
        self._set_items(self._pop_to_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Unknown):
            return
        if not isinstance(target, dict) or len(items) % 2:
            raise FormatError(f"sets items of a {type(target).__name__}")
        keys = self.checked_keys(items[::2], cost=110)
        target.update(zip(keys, items[1::2], strict=True))

    def _op_additems(self) -> None:
        items = self._pop_to_mark()
        target = self._stack[-1]
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

    def _op_put(self) -> None:
        self._remember_value(int(self._line()[:20]))

    def _op_binput(self) -> None:
        self._remember_value(self._read_exactly(1)[0])

    def _op_long_binput(self) -> None:
        self._remember_value(self._read_integer(4))

    def _op_memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def _remember_value(self, place: int) -> None:
        """Remember the last value. Picklers number values in order, Python 2 from 1 on."""
        memo = self._memo
        if place == len(memo):
            memo.append(self._stack[-1])
            return
        if not 0 <= place <= len(memo) + 1:
            raise FormatError(f"remembers a value as number {place:,} after {len(memo):,} values")
        if place > len(memo):
            memo += [_MISSING, _MISSING]
        memo[place] = self._stack[-1]

    def _op_get(self) -> None:
        self._get(int(self._line()[:20]))

    def _op_binget(self) -> None:
        self._get(self._read_exactly(1)[0])

    def _op_long_binget(self) -> None:
        self._get(self._read_integer(4))

    def _get(self, place: int) -> None:
        if not 0 <= place < len(self._memo) or self._memo[place] is _MISSING:
            raise FormatError(f"refers to value {place:,}, which it did not remember")
        self._stack.append(self._memo[place])

    def _op_global(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(self._global(module.decode("utf-8"), name.decode("utf-8")))

    def _op_stack_global(self) -> None:
        name = self._stack.pop()
        self._stack.append(self._global(self._stack.pop(), name))

    def _op_inst(self) -> None:
        module, name = self._line(), self._line()
        args = self._pop_to_mark()
        self.charge(56 + 8 * len(args))
        callee = self._global(module.decode("utf-8"), name.decode("utf-8"))
        self._stack.append(self.describe_call(callee, tuple(args)))

    def _op_obj(self) -> None:
        args = self._pop_to_mark()
        callee = args.pop(0)
        self.charge(56 + 8 * len(args))
        self._stack.append(self.describe_call(callee, tuple(args)))

    def _op_reduce(self) -> None:
        args = self._stack.pop()
        self._stack.append(self.describe_call(self._stack.pop(), args))

    def _op_newobj_ex(self) -> None:
        named = self._stack.pop()
        args = self._stack.pop()
        callee = self._stack.pop()
        if not isinstance(named, dict):
            raise FormatError("makes an object with names that are no dict")
        if named:
            name = callee.name if isinstance(callee, Global) else type(callee).__name__
            self.charge(100)
            self._stack.append(Unknown(name, (args, named)))
        else:
            self._stack.append(self.describe_call(callee, args))

    def _op_build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
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

    def _op_persid(self) -> None:
        self._stack.append(self._by_id(self._line().decode("utf-8")))

    def _op_binpersid(self) -> None:
        self._stack.append(self._by_id(self._stack.pop()))

    def _by_id(self, name: Any) -> Any:
        if self._persistent is None:
            raise FormatError("refers to an object outside of the pickle, by a persistent id")
        return self._persistent(name)


_SMALL = 2**60  # hashes of smaller integers are all different


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


_OPERATIONS: dict[bytes, Callable[[Machine], None]] = {
    b"\x80": Machine._op_proto,
    b"\x95": Machine._op_frame,
    b"(": Machine._op_mark,
    b"0": Machine._op_pop,
    b"1": Machine._op_pop_mark,
    b"2": Machine._op_dup,
    b"N": Machine._op_none,
    b"\x88": Machine._op_true,
    b"\x89": Machine._op_false,
    b"I": Machine._op_int,
    b"L": Machine._op_long,
    b"J": Machine._op_binint,
    b"K": Machine._op_binint1,
    b"M": Machine._op_binint2,
    b"\x8a": Machine._op_long1,
    b"\x8b": Machine._op_long4,
    b"F": Machine._op_float,
    b"G": Machine._op_binfloat,
    b"S": Machine._op_string,
    b"T": Machine._op_binstring,
    b"U": Machine._op_short_binstring,
    b"V": Machine._op_unicode,
    b"X": Machine._op_binunicode,
    b"\x8c": Machine._op_short_binunicode,
    b"\x8d": Machine._op_binunicode8,
    b"B": Machine._op_binbytes,
    b"C": Machine._op_short_binbytes,
    b"\x8e": Machine._op_binbytes8,
    b"\x96": Machine._op_bytearray8,
    b"]": Machine._op_empty_list,
    b")": Machine._op_empty_tuple,
    b"}": Machine._op_empty_dict,
    b"\x8f": Machine._op_empty_set,
    b"l": Machine._op_list,
    b"t": Machine._op_tuple,
    b"\x85": Machine._op_tuple1,
    b"\x86": Machine._op_tuple2,
    b"\x87": Machine._op_tuple3,
    b"d": Machine._op_dict,
    b"\x91": Machine._op_frozenset,
    b"a": Machine._op_append,
    b"e": Machine._op_appends,
    b"s": Machine._op_setitem,
    b"u": Machine._op_setitems,
    b"\x90": Machine._op_additems,
    b"p": Machine._op_put,
    b"q": Machine._op_binput,
    b"r": Machine._op_long_binput,
    b"\x94": Machine._op_memoize,
    b"g": Machine._op_get,
    b"h": Machine._op_binget,
    b"j": Machine._op_long_binget,
    b"c": Machine._op_global,
    b"\x93": Machine._op_stack_global,
    b"i": Machine._op_inst,
    b"o": Machine._op_obj,
    b"R": Machine._op_reduce,
    b"\x81": Machine._op_reduce,  # NEWOBJ: a class and a tuple, which is all that a call is here
    b"\x92": Machine._op_newobj_ex,
    b"b": Machine._op_build,
    b"P": Machine._op_persid,
    b"Q": Machine._op_binpersid,
}
_EXTENSION = "uses copyreg's extension registry, which stands for names that the file does not tell"
_REFUSED: dict[bytes, str] = {
    b"\x82": _EXTENSION,
    b"\x83": _EXTENSION,
    b"\x84": _EXTENSION,
    b"\x97": "refers to a buffer outside of the pickle",
    b"\x98": "refers to a buffer outside of the pickle",
}
