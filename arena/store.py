"""``Store``: a dict whose values are persisted memory, freed when replaced or deleted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeAlias, TypeVar, overload

from arena import _native
from arena._native import Block, Str, StrBuf

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Store"]

Handle: TypeAlias = Block | Str | StrBuf
D = TypeVar("D")


class Store(MutableMapping[str, Handle]):
    """State that outlives ticks, kept in persisted memory.

    What is put in is copied: ``str`` and bytes-like values become a ``Str``, a handle keeps its
    type. Reading gives the persisted handle, with no copy. A value that is replaced, deleted or
    cleared is freed at once, so a handle read before raises ``StaleError`` after; a view of it
    keeps its bytes until the view dies. ``pop`` hands the value over instead: it is the caller's.

    Keys are ``str``. Any thread may use a store; each call for one key is one step. Iterating
    while another thread changes it raises ``RuntimeError`` or ``KeyError``. Other Python values
    do not live in arena memory: put ``json.dumps(value)`` in. Raises ``TypeError`` for those,
    ``StaleError`` for a stale handle, ``MemoryError``; the value is then not put in, and what the
    key had before stays.
    """

    __slots__ = ("_values",)

    def __init__(
        self,
        values: Mapping[str, str | Buffer] | Iterable[tuple[str, str | Buffer]] = (),
        /,
        **more: str | Buffer,
    ) -> None:
        self._values: dict[str, Handle] = {}
        self.update(values, **more)

    def __getitem__(self, key: str) -> Handle:
        return self._values[key]

    def __setitem__(self, key: str, value: str | Buffer) -> None:
        self._put(key, self._persist(key, value))

    def _persist(self, key: str, value: str | Buffer) -> Handle | None:
        """Return a copy to put in, or None where the value is the one that is there."""
        if not isinstance(key, str):
            raise TypeError(f"the keys of a Store are str, not {type(key).__name__}")
        if value is not None and value is self._values.get(key):
            return None  # store[key] += "more" has changed the value in place
        try:
            return _native.persist(value)
        except TypeError:
            raise TypeError(
                f"a Store holds text and bytes, not {type(value).__name__}: "
                "put in str, bytes, a handle, or json.dumps(value)"
            ) from None

    def _put(self, key: str, kept: Handle | None) -> None:
        if kept is None:
            return
        old: Handle | None = _native._swap(self._values, str.__str__(key), kept)
        if old is not None:
            old._discard()

    def __delitem__(self, key: str) -> None:
        self._values.pop(key)._discard()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __repr__(self) -> str:
        return f"<arena.Store of {len(self)} values, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all values, without keys and overhead."""
        return sum(value.nbytes for value in list(self._values.values()))

    def update(  # type: ignore[override]
        self,
        values: Mapping[str, str | Buffer] | Iterable[tuple[str, str | Buffer]] = (),
        /,
        **more: str | Buffer,
    ) -> None:
        """Put all values in, or none: on an error the store is as it was.

        Raises as ``store[key] = value``.
        """
        given = dict(values, **more)
        kept: dict[str, Handle | None] = {}
        try:
            for key, value in given.items():
                kept[key] = self._persist(key, value)
        except BaseException:
            for handle in kept.values():
                if handle is not None:
                    handle._discard()
            raise
        for key, handle in kept.items():
            self._put(key, handle)

    def setdefault(self, key: str, default: str | Buffer = "", /) -> Handle:
        """Return the value of ``key``; put ``default`` in first if there is none.

        Raises as ``store[key] = value``. Of several threads one puts its value in.
        """
        found = self._values.get(key)
        if found is not None:
            return found
        added = Store({key: default})  # checked and persisted as any value
        return self._values.setdefault(key, added.pop(key))

    @overload
    def pop(self, key: str, /) -> Handle: ...
    @overload
    def pop(self, key: str, default: D, /) -> Handle | D: ...
    def pop(self, key: str, /, *default: Any) -> Any:
        """Take a value out without freeing it: it lives until its handle is freed or collected.

        Raises KeyError when there is none and no default is given.
        """
        return self._values.pop(key, *default)

    def popitem(self) -> tuple[str, Handle]:
        """Take the newest key and value out without freeing the value. Raises KeyError if empty."""
        return self._values.popitem()

    def clear(self) -> None:
        """Free every value; those with a live view when that dies."""
        while self._values:
            try:
                _, value = self._values.popitem()
            except KeyError:  # another thread took the last one
                return
            value._discard()

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            "a Store cannot be pickled or copied: make a new Store from its items, or take "
            "{key: bytes(value) for key, value in store.items()}"
        )
