"""Typed trees: exact encoding of Python values as bytes, decoded without running any code.

The grammar is docs/format.md, section 6. Torch values and arrays are nodes of a tree; the caller
makes them from live objects (`lower`) and converts them back (`lift`).
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby, repeat
from operator import contains, itemgetter, methodcaller
from typing import Any, TypeAlias

import msgspec

from holdfast.errors import FormatError, LimitExceeded, UnsupportedState
from holdfast.format import strictjson
from holdfast.format.layout import FORMAT_VERSION, MAX_TREE_NBYTES
from holdfast.format.nodes import (
    READERS,
    WRITERS,
    ArrayRef,
    EnumValue,
    GeneratorState,
    SizeTuple,
    SubclassRef,
    TensorRef,
    are_tensors,
    is_unicode,
    read_tensor,
)
from holdfast.format.tensors import count_record_nbytes
from holdfast.store.base import Buffer

MAX_TREE_VALUES = 4_000_000
_LIMITS = {"max_nbytes": MAX_TREE_NBYTES, "max_values": MAX_TREE_VALUES}
MAX_OTHER_KEYS = 100_000
MAX_COMPARISONS = 2**26
"""Limit of comparisons of dict keys and set members with the same hash: about a second. Programs'
own data is far below it, such as all powers of two or offsets in a grid of seven axes."""
# A shorter document cannot hold too many values.
_SURELY_FINE_NBYTES = 1024 * 1024

_MAX_LEVEL = strictjson.MAX_DEPTH - 5  # a dict takes three levels, a leaf in it two


class Refused(msgspec.Struct, frozen=True):
    """Result of `lower` for an object that cannot be saved, with the reason."""

    reason: str


Lower: TypeAlias = Callable[[Any, str], Any]
StandIn: TypeAlias = Callable[[str, str], TensorRef]
"""Makes the node in the place of a leaf that cannot be saved, of its path and the reason."""
Lift: TypeAlias = Callable[[Any], Any]
LiftTensors: TypeAlias = Callable[[Sequence[TensorRef]], Sequence[Any]]


RANKS = "$ranks"
"""Node at the root of a tree of which each rank has its own: the list of them."""


class DequeItems(list[Any]):
    """The items of a stored deque, in order; `lift` does not convert it."""

    maxlen: int | None = None


class TreeDocument:
    """An encoded tree, as nodes and as bytes; call `write` after changing numbers in `node`."""

    def __init__(self, node: Any, beside: Mapping[str, Any]) -> None:
        """Encode the nodes into `data`; raises `UnsupportedState` if the tree is too large."""
        self.node = node
        self._beside = beside
        self.data = self._encode_document()
        self._check_limits(self.data)

    def encode_nodes(self) -> None:
        """Encode the nodes into `data` again."""
        data = self._encode_document()
        if len(data) > _SURELY_FINE_NBYTES:
            self._check_limits(data)
        self.data = data

    def _encode_document(self) -> bytes:
        content = {"holdfast": FORMAT_VERSION, "tree": self.node, **self._beside}
        return msgspec.json.encode(content)

    def _check_limits(self, data: bytes) -> None:
        try:
            strictjson.check_limits(data, what="", **_LIMITS)
        except LimitExceeded as err:
            advice = "large data belongs in tensors or arrays"
            raise UnsupportedState([("the tree", f"{err}; {advice}")]) from err


def document(
    tree: Any,
    *,
    lower: Lower | None = None,
    beside: Mapping[str, Any] | None = None,
    stand_in: StandIn | None = None,
) -> TreeDocument:
    """Encode `tree` as a document, with plain values beside it under the names in `beside`.

    `lower(object, path)` is called for every object that is not of an exact type of the
    grammar. It returns a node, another encodable value, `Refused`, or `NotImplemented`. With
    `stand_in`, leaves for which it returns one of the last two are no offenders.

    Raises:
        UnsupportedState: lists every offender, with its path.
    """
    encoder = _TreeEncoder(lower, stand_in)
    node = encoder.encode(tree, "", 1)
    if encoder.offenders:
        raise UnsupportedState(encoder.offenders)
    return TreeDocument(node, beside or {})


def decode_tree(
    data: Buffer, *, lift: Lift | None = None, lift_tensors: LiftTensors | None = None, what: str
) -> Any:
    """Decode the tree in `data`. `lift(node)` converts a node to an object; without it nodes stay.

    `lift_tensors(nodes)`, if given, does the same at once for the members of a dict that has
    nothing but tensors.

    A tree of which each rank has its own gives the list of them, in the order of ranks.
    Shared containers are shared again, so the result need not be a tree; a naive walk over it
    takes at most 4 million steps. Errors of `lift` are raised as they are.
    """
    decoder = _TreeDecoder(lift, lift_tensors, what)
    tensors = _decode_tensors(data)
    if tensors is not None:
        return decoder.lifted_dict(tensors)
    document = load_document(data, what=what)
    if "tree" not in document:
        raise FormatError(f"{what}: has no `tree`")
    node = document["tree"]
    try:
        if isinstance(node, dict) and node.keys() == {RANKS}:
            if not isinstance(node[RANKS], list) or not node[RANKS]:
                raise FormatError(f"{what}: `{RANKS}` is not a list of trees, one for each rank")
            return [_TreeDecoder(lift, lift_tensors, what).decode(one) for one in node[RANKS]]
        return decoder.decode(node)
    except RecursionError as err:
        raise LimitExceeded(f"{what}: nested too deeply for the stack that is left") from err


class _Tensors(msgspec.Struct):
    """A document whose tree is a dict of only tensors, with members as `document` orders them."""

    holdfast: int
    tree: dict[str, TensorRef]


def _decode_tensors(data: Buffer) -> dict[str, TensorRef] | None:
    """Decode a dict of only tensors fast; None if it has others or is not written canonically."""
    document = strictjson.loads_as(data, _Tensors, **_LIMITS)
    if document is None or document.holdfast != FORMAT_VERSION:
        return None
    text, tree = bytes(data), document.tree
    # Each node has one name that starts so. Any other would be a node in the place of a key.
    if text.count(b'"$') != len(tree):
        return None
    says_more = b'","' in text  # whether any tensor has members besides its key
    return tree if not says_more or are_tensors(tree.values()) else None


def decode_beside(data: Buffer, name: str, *, what: str) -> Any:
    """Return the plain value that is stored beside a tree under `name`, or None."""
    return load_document(data, what=what).get(name)


def decode_frozen(data: Buffer, *, what: str) -> dict[str, str]:
    """Return the record beside a module's tree: parameter -> dtype, sizes and digest as text."""
    if f'"{strictjson.FROZEN}"'.encode() not in bytes(data):
        return {}
    found = decode_beside(data, strictjson.FROZEN, what=what)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(type(text) is str for text in found.values()):
        raise FormatError(f"{what}: {strictjson.FROZEN} is not a dict of str")
    for text in found.values():
        count_record_nbytes(text, what=what)
    return found


def load_document(data: Buffer, *, what: str) -> dict[str, Any]:
    """Decode the JSON of a tree's document, and check its version."""
    document = strictjson.loads(data, what=what, **_LIMITS)
    strictjson.check_version(document, what=what)
    return document  # type: ignore[no-any-return]


def join_path(path: str, name: object) -> str:
    """Append a name to a path, as in "optimizer.state.0"."""
    return f"{path}.{name}" if path else str(name)


class _TreeEncoder:
    """Encodes a tree as nodes; collects every offender instead of stopping at the first."""

    def __init__(self, lower: Lower | None, stand_in: StandIn | None) -> None:
        self.offenders: list[tuple[str, str]] = []
        self._lower = lower
        self._stand_in = stand_in
        self._numbers: dict[int, int] = {}  # id of a container → its number in the tree
        self._weights: dict[int, int] = {}  # number of a finished container → number of its values
        self._weight = 0
        self._active: set[int] = set()
        self._key_depth = 0
        self._num_other_keys = 0
        self._num_comparisons = 0
        self._kept_alive: list[Any] = []  # results of `lower`, kept so that no id is reused

    def encode(self, value: Any, path: str, level: int, *, lowered: bool = False) -> Any:
        """Encode `value`, which is nested inside `level` brackets, as a node."""
        self._weight += 1
        type_ = type(value)
        if type_ in _CONTAINERS:
            return self._container(value, path, level)
        if self._key_depth and type_ in _NEVER_KEYS:
            return self._record_offender(path, "a tensor, an array or a generator cannot be a key")
        write = WRITERS.get(type_)
        if write is not None:
            try:
                return write(value)
            except ValueError as err:
                return self._record_offender(path, str(err))
        if type_ is GeneratorState:
            return self._encode_generator(value, path, level)
        if type_ is SubclassRef:
            return self._encode_subclass(value, path, level)
        if type_ is EnumValue or isinstance(value, enum.Enum):
            return self._enum(value, path, level)
        return self._lower_and_encode(value, path, level, lowered=lowered)

    def _record_offender(self, path: str, reason: str) -> None:
        self.offenders.append((path or "the tree", reason))

    def _lower_and_encode(self, value: Any, path: str, level: int, *, lowered: bool) -> Any:
        replacement: Any = NotImplemented
        if self._lower is not None and not lowered:
            replacement = self._lower(value, path)
        if replacement is NotImplemented:
            replacement = Refused(_unsupported_reason(value))
        if type(replacement) is Refused:
            if self._stand_in is None or self._key_depth:
                return self._record_offender(path, replacement.reason)
            replacement = self._stand_in(path, replacement.reason)
        self._kept_alive.append(replacement)
        return self.encode(replacement, path, level, lowered=True)

    def _container(self, value: Any, path: str, level: int) -> Any:
        identity = id(value)
        if identity in self._active:
            return self._record_offender(path, "contains itself")
        if level > _MAX_LEVEL:
            return self._record_offender(path, "nested too deeply")
        if self._key_depth:
            return _CONTAINERS[type(value)](self, value, path, level)
        if identity in self._numbers:
            return self._encode_reference(self._numbers[identity], path)
        number = self._numbers[identity] = len(self._numbers)
        weight = self._weight
        self._active.add(identity)
        node = _CONTAINERS[type(value)](self, value, path, level)
        self._active.remove(identity)
        self._weights[number] = self._weight - weight
        return node

    def _encode_reference(self, number: int, path: str) -> Any:
        self._weight += self._weights[number]
        if self._weight > MAX_TREE_VALUES:
            return self._record_offender(
                path, f"more than {MAX_TREE_VALUES:,} values, shared ones counted"
            )
        return {"$same": number}

    def write_list(self, value: Iterable[Any], path: str, level: int) -> list[Any]:
        encode = self.encode
        return [encode(item, join_path(path, i), level + 1) for i, item in enumerate(value)]

    def write_tuple(self, value: Iterable[Any], path: str, level: int) -> Any:
        return {"$tuple": self.write_list(value, path, level + 1)}

    def write_dict(self, value: dict[Any, Any], path: str, level: int) -> Any:
        if not all(type(key) is str and key[:1] != "$" for key in value):
            return {"$dict": self._encode_pairs(value, path, level)}
        for key in value:
            if not is_unicode(key):
                return self._record_offender(path, f"the key {key[:80]!a} is not Unicode text")
        encode = self.encode
        return {key: encode(item, join_path(path, key), level + 1) for key, item in value.items()}

    def write_ordered(self, value: OrderedDict[Any, Any], path: str, level: int) -> Any:
        return {"$ordered": self._encode_pairs(value, path, level)}

    def write_counter(self, value: Counter[Any], path: str, level: int) -> Any:
        return {"$counter": self._encode_pairs(value, path, level)}

    def write_deque(self, value: deque[Any] | DequeItems, path: str, level: int) -> Any:
        return {"$deque": [value.maxlen, self.write_list(value, path, level + 2)]}

    def write_set(self, value: Iterable[Any], path: str, level: int) -> Any:
        return {"$set": self._members(value, path, level)}

    def write_frozenset(self, value: Iterable[Any], path: str, level: int) -> Any:
        return {"$frozenset": self._members(value, path, level)}

    def _encode_pairs(self, value: Mapping[Any, Any], path: str, level: int) -> list[list[Any]]:
        pairs = []
        for key, item in value.items():
            at = join_path(path, _format_segment(key))
            pairs.append([self._encode_key(key, at, level + 3), self.encode(item, at, level + 3)])
        self._check_keys(value, [key for key, _ in pairs], path)
        return pairs

    def _members(self, value: Iterable[Any], path: str, level: int) -> list[Any]:
        members = [
            self._encode_key(item, join_path(path, _format_segment(item)), level + 2)
            for item in value
        ]
        if not self.offenders:
            members.sort(key=_sort_key)
        self._check_keys(value, members, path)
        return members

    def _encode_key(self, key: Any, path: str, level: int) -> Any:
        self._key_depth += 1
        node = self.encode(key, path, level)
        self._key_depth -= 1
        return node

    def _check_keys(self, values: Iterable[Any], keys: Sequence[Any], path: str) -> None:
        num_others = _num_other_keys(keys)
        self._num_other_keys += num_others
        if self._num_other_keys > MAX_OTHER_KEYS:
            self._num_other_keys = 0
            self._record_offender(path, f"with it there are more than {_OTHER_KEYS_LIMIT}")
        elif num_others:
            self._num_comparisons += _num_comparisons(values)
            if self._num_comparisons > MAX_COMPARISONS:
                self._num_comparisons = 0
                self._record_offender(path, f"with it there are {_COMPARISONS_LIMIT}")
        texts = [msgspec.json.encode(key) for key in keys if type(key) is dict]
        texts = [text for text in texts if not text.startswith(_MAYBE_NAN)]
        if len(set(texts)) != len(texts):
            self._record_offender(path, "two of its keys would be written in the same way")

    def _enum(self, value: Any, path: str, level: int) -> Any:
        if level > _MAX_LEVEL:
            return self._record_offender(path, "nested too deeply")
        kind = value.type if type(value) is EnumValue else type_name(type(value))
        name = None if value.name is None else self.encode(value.name, path, level)
        member = self.encode(value.value, join_path(path, "value"), level + 2)
        return {"$enum": {"type": kind, "name": name, "value": member}}

    def _encode_subclass(self, value: SubclassRef, path: str, level: int) -> Any:
        if level > _MAX_LEVEL:
            return self._record_offender(path, "nested too deeply")
        tensors = {
            name: self.encode(part, join_path(path, name), level + 3)
            for name, part in value.tensors.items()
        }
        node = {"type": value.type, "shape": value.shape, "dtype": value.dtype, "tensors": tensors}
        node["context"] = self.encode(value.context, join_path(path, "context"), level + 2)
        return {"$subclass": node}

    def _encode_generator(self, value: GeneratorState, path: str, level: int) -> Any:
        if level > _MAX_LEVEL:
            return self._record_offender(path, "nested too deeply")
        members: dict[str, Any] = {"kind": value.kind}
        for name, member in value.members.items():
            if name == "kind" or name[:1] == "$":
                self._record_offender(path, f"a generator's state may have no member {name!r}")
            members[name] = self.encode(member, join_path(path, name), level + 2)
        return {"$generator": members}


class _TreeDecoder:
    def __init__(self, lift: Lift | None, lift_tensors: LiftTensors | None, what: str) -> None:
        self._lift = lift
        self._lift_tensors = lift_tensors
        self._what = what
        self._containers: list[Any] = []
        self._weights: list[int | None] = []  # None: not finished
        self._weight = 0
        self._key_depth = 0
        self._num_other_keys = 0
        self._num_comparisons = 0

    def decode(self, node: Any) -> Any:
        self._weight += 1
        type_ = type(node)
        if type_ is dict:
            return self._object(node)
        return self._container("", node) if type_ is list else node

    def _error(self, reason: str) -> FormatError:
        return FormatError(f"{self._what}: {reason}")

    def _object(self, node: dict[str, Any]) -> Any:
        name = next(iter(node), "")
        if name[:1] != "$":
            return self._container("", node)
        if self._key_depth and name in _NEVER_IN_KEYS:
            raise self._error(f"a node {name!r} in a key or a set")
        argument = node[name]
        if name == "$tensor":
            return self._decode_tensor(node)
        if len(node) != 1:
            raise self._error(f"a node {name[:40]!r} with other members")
        if name in _COLLECTIONS:
            if type(argument) is not list:
                raise self._error(f"the node {name!r} holds no list")
            return self._container(name, argument)
        if name in READERS:
            return self._leaf(name, argument)
        if name in _INNER_READERS:
            return _INNER_READERS[name](self, argument)
        raise self._error(f"unknown node {name[:40]!r}")

    def _leaf(self, name: str, argument: Any) -> Any:
        value = self._read_node(name, argument)
        return self._lifted(value) if name in _LIFTED else value

    def _read_node(self, name: str, argument: Any) -> Any:
        try:
            return READERS[name](argument)
        except (ValueError, OverflowError) as err:
            raise FormatError(f"{self._what}: in a node {name!r}: {str(err)[:200]}") from err

    def _lifted(self, node: Any) -> Any:
        return node if self._lift is None else self._lift(node)

    def _decode_tensor(self, node: dict[str, Any]) -> Any:
        try:
            ref = read_tensor(node)
        except ValueError as err:
            raise self._error(f"in a $tensor node: {err}") from err
        return self._lifted(ref)

    def _container(self, name: str, argument: Any) -> Any:
        """Decode the container of the node `name`; with "" `argument` is a plain list or dict."""
        number, weight, is_key = len(self._containers), self._weight, self._key_depth > 0
        if not is_key:
            self._containers.append(None)
            self._weights.append(None)
        value: Any
        if name:
            value = self._collection(name, argument)
        else:
            value = self._items(argument) if type(argument) is list else self._plain_dict(argument)
        if not is_key:
            self._containers[number] = value
            self._weights[number] = self._weight - weight
        return value

    def _collection(self, name: str, nodes: list[Any]) -> Any:
        if name == "$tuple":
            return tuple(self._items(nodes))
        if name == "$deque":
            return self._read_deque(nodes)
        items = self._keys(nodes) if name in ("$set", "$frozenset") else self._decode_pairs(nodes)
        try:
            value = _COLLECTIONS[name](items)
        except OverflowError as err:
            raise FormatError(f"{self._what}: keys that cannot be compared: {err}") from err
        if len(value) != len(items):
            raise self._error("a key or a member of a set appears twice")
        return Counter(value) if name == "$counter" else value

    def _read_deque(self, argument: list[Any]) -> DequeItems:
        match argument:
            case [maxlen, list() as nodes] if maxlen is None or type(maxlen) is int:
                found = DequeItems(self._items(nodes))
            case _:
                raise self._error("a malformed $deque node")
        if maxlen is not None and not len(found) <= maxlen < 2**63:
            raise self._error(f"a $deque node of {len(found)} items in {str(maxlen)[:40]}")
        found.maxlen = maxlen
        return found

    def _items(self, nodes: list[Any]) -> list[Any]:
        decode = self.decode
        return [decode(node) for node in nodes]

    def _plain_dict(self, node: dict[str, Any]) -> dict[str, Any]:
        decode = self.decode
        if any(map(_is_node_name, node)):
            raise self._error("an object that is neither a node nor a dict")
        if self._lift_tensors is not None and _are_plain_tensors(node.values()):
            self._weight += len(node)
            refs = map(TensorRef, map(_KEY, node.values()))
            return dict(zip(node, self._lift_tensors([*refs]), strict=True))
        return {name: decode(item) for name, item in node.items()}

    def lifted_dict(self, refs: Mapping[str, TensorRef]) -> dict[str, Any]:
        """Convert the tensor nodes of a dict by `lift_tensors` or `lift`, if given."""
        if self._lift_tensors is not None:
            return dict(zip(refs, self._lift_tensors([*refs.values()]), strict=True))
        return {name: self._lifted(ref) for name, ref in refs.items()}

    def _decode_pairs(self, nodes: list[Any]) -> list[tuple[Any, Any]]:
        if not all(type(pair) is list and len(pair) == 2 for pair in nodes):
            raise self._error("a dict node holds something that is not a pair")
        keys = self._keys([key for key, _ in nodes])
        return [*zip(keys, self._items([item for _, item in nodes]), strict=True)]

    def _keys(self, nodes: list[Any]) -> list[Any]:
        """Decode dict keys or set members; raise `LimitExceeded` if hashing them may be slow."""
        num_others = _num_other_keys(nodes)
        self._num_other_keys += num_others
        if self._num_other_keys > MAX_OTHER_KEYS:
            raise LimitExceeded(f"{self._what}: more than {_OTHER_KEYS_LIMIT}")
        self._key_depth += 1
        keys = self._items(nodes)
        self._key_depth -= 1
        if num_others:
            try:
                self._num_comparisons += _num_comparisons(keys)
            except TypeError as err:
                raise FormatError(f"{self._what}: a key that cannot be one: {err}") from err
            if self._num_comparisons > MAX_COMPARISONS:
                raise LimitExceeded(f"{self._what}: {_COMPARISONS_LIMIT}")
        return keys

    def read_same(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._containers):
            raise self._error("a $same node with an invalid reference")
        weight = self._weights[number]
        if weight is None:
            raise self._error("a $same node inside the container that it names")
        self._weight += weight
        if self._weight > MAX_TREE_VALUES:
            raise LimitExceeded(
                f"{self._what}: more than {MAX_TREE_VALUES:,} values, shared ones counted"
            )
        return self._containers[number]

    def read_enum(self, node: Any) -> Any:
        match node:
            case {
                "type": str() as type_,
                "name": (str() | None) as name,
                "value": value,
                **rest,
            } if not rest:
                return self._lifted(EnumValue(type_, name, self.decode(value)))
            case _:
                raise self._error("a malformed $enum node")

    def read_subclass(self, node: Any) -> Any:
        match node:
            case {
                "type": str() as type_,
                "shape": shape,
                "dtype": dtype,
                "tensors": dict() as tensors,
                "context": context,
                **rest,
            } if tensors and not rest:
                is_named = not any(map(_is_node_name, tensors))
                if is_named and all(map(_is_tensor_node, tensors.values())):
                    sizes = self._read_node("$size", shape).dims
                    self._read_node("$dtype", dtype)
                    inner = {name: self.decode(part) for name, part in tensors.items()}
                    ref = SubclassRef(type_, sizes, dtype, inner, self.decode(context))
                    return self._lifted(ref)
        raise self._error("a malformed $subclass node")

    def read_generator(self, node: Any) -> Any:
        if type(node) is not dict or type(node.get("kind")) is not str:
            raise self._error("a $generator node without a kind")
        if any(name[:1] == "$" for name in node):
            raise self._error("a malformed $generator node")
        members = {name: self.decode(item) for name, item in node.items() if name != "kind"}
        return self._lifted(GeneratorState(node["kind"], members))


def _is_tensor_node(node: Any) -> bool:
    return type(node) is dict and next(iter(node), "") in ("$tensor", "$subclass")


def _are_plain_tensors(nodes: Collection[Any]) -> bool:
    """Whether these are two or more `$tensor` nodes with a key and no other member."""
    if len(nodes) < 2 or {*map(type, nodes)} != {dict} or {*map(len, nodes)} != {1}:
        return False
    return all(map(contains, nodes, repeat("$tensor"))) and {*map(type, map(_KEY, nodes))} == {str}


def _num_other_keys(nodes: Sequence[Any]) -> int:
    """Count keys that are no text nor 0, 1, 2, …, as their hashes can be made to collide."""
    if all(type(node) is int and node == i for i, node in enumerate(nodes)):
        return 0
    return sum(type(node) is not str for node in nodes)


def _num_comparisons(keys: Iterable[Any]) -> int:
    """Compute, by sorting hashes, an upper bound of comparisons in a dict or set of these keys."""
    hashed = sorted(((hash(key), key) for key in keys), key=itemgetter(0))
    total = 0
    for _, group in groupby(hashed, key=itemgetter(0)):
        same = [key for _, key in group]
        if len(same) > 1:
            total += (len(same) - 1) * sum(map(_num_values, same)) // 2
    return total


def _num_values(key: Any) -> int:
    """Compute an upper bound of the value comparisons for comparing a key with another."""
    if isinstance(key, EnumValue):
        return 1 + _num_values(key.value)
    if isinstance(key, SizeTuple):
        return 1 + len(key.dims)
    if isinstance(key, tuple):
        return 1 + sum(map(_num_values, key))
    if isinstance(key, frozenset):
        # Each member is compared with those of the same hash in the other set.
        same = [len([*group]) for _, group in groupby(sorted(map(hash, key)))]
        return 1 + max(same, default=0) * sum(map(_num_values, key))
    return 1


def _sort_key(node: Any) -> tuple[int, int, bytes]:
    """Make the sort key of a set's member, by value only: integers first."""
    return (0, node, b"") if type(node) is int else (1, 0, msgspec.json.encode(node))


def _format_segment(key: Any) -> str:
    """Format a dict key or set member as a segment of a path."""
    if type(key) is str or (type(key) is int and key.bit_length() < 2000):
        return str(key)[:200]
    return f"<{type(key).__name__}>"


def type_name(type_: type) -> str:
    """Return the name of a class in the format: "module:Name"."""
    return f"{type_.__module__}:{type_.__qualname__}"


def _unsupported_reason(value: Any) -> str:
    name = type_name(type(value))
    for base in (*_CONTAINERS, str, bytes, int, float):
        if isinstance(value, base):
            return f"{name} is a subclass of {base.__name__}, and would be loaded as one"
    return f"{name} is not a type that can be saved"


_KEY = itemgetter("$tensor")
_is_node_name = methodcaller("startswith", "$")
_COMPARISONS_LIMIT = (
    f"so many keys of the same hash that tables of them take more than "
    f"{MAX_COMPARISONS:,} comparisons; keep such data in a tensor"
)
_OTHER_KEYS_LIMIT = f"{MAX_OTHER_KEYS:,} keys that are not text; keep such data in a tensor"

_CONTAINERS: dict[type, Callable[[_TreeEncoder, Any, str, int], Any]] = {
    list: _TreeEncoder.write_list,
    tuple: _TreeEncoder.write_tuple,
    dict: _TreeEncoder.write_dict,
    OrderedDict: _TreeEncoder.write_ordered,
    Counter: _TreeEncoder.write_counter,
    set: _TreeEncoder.write_set,
    frozenset: _TreeEncoder.write_frozenset,
    deque: _TreeEncoder.write_deque,
    DequeItems: _TreeEncoder.write_deque,
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$deque": DequeItems,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": dict,  # a Counter would count the pairs
}
_INNER_READERS: dict[str, Callable[[_TreeDecoder, Any], Any]] = {
    "$same": _TreeDecoder.read_same,
    "$enum": _TreeDecoder.read_enum,
    "$subclass": _TreeDecoder.read_subclass,
    "$generator": _TreeDecoder.read_generator,
}
_NEVER_KEYS = (TensorRef, ArrayRef, GeneratorState, SubclassRef)
_NEVER_IN_KEYS = ("$tensor", "$array", "$generator", "$subclass", "$same", "$deque")
_MAYBE_NAN = (b'{"$float"', b'{"$scalar"')
_LIFTED = frozenset({"$array", "$dtype", "$device", "$size"})
