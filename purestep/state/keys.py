"""Random keys: values, not generators. Every random number of a run is a pure function of one `Key`."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_SIZE = 16  # bytes: 128 bits
_MT_WORDS = 624  # words of a Mersenne Twister's state
_MT_OFFSET = 24  # bytes before them in a CPU generator's state: seed, left, seeded, next


@dataclass(frozen=True, slots=True)
class Key:
    """A 128-bit random key: derive from it, never advance it.

    Derivation is a BLAKE2b hash of the parent and of what is folded in, so keys that came by different roads do not
    meet: seed 0 of rank 1 is not seed 1 of rank 0. The arithmetic is on the host and holds no generator.

    >>> import purestep as ps
    >>> key = ps.key(0)
    >>> key.fold_in(1) == key.fold_in(1), key.fold_in(1) == key.fold_in(2)
    (True, False)
    >>> key.fold_in("data", 3) == key.fold_in("data").fold_in(3)
    True
    """

    data: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes) or len(self.data) != _SIZE:
            raise ValueError(f"a Key holds {_SIZE} bytes, got {self.data!r}; make one with ps.key(seed)")

    def fold_in(self, *data: int | str) -> Key:
        """The key derived from this one by each of `data` in turn (any integer, or a string)."""
        key = self.data
        for datum in data:
            key = _hash(key, _encode(datum), b"fold_in")
        return Key(key)

    def split(self, num: int = 2) -> tuple[Key, ...]:
        """`num` keys, distinct from each other and from everything `fold_in` derives."""
        if operator.index(num) < 1:
            raise ValueError(f"split needs a positive number of keys, got {num}")
        return tuple(Key(_hash(self.data, _encode(i), b"split")) for i in range(num))

    @property
    def seed(self) -> int:
        """64 bits of this key, for a library that wants an integer seed."""
        return int.from_bytes(_hash(self.data, b"", b"seed")[:8], "little")

    def hex(self) -> str:
        """The key as 32 hexadecimal digits; `Key.from_hex` reads them back."""
        return self.data.hex()

    @classmethod
    def from_hex(cls, text: str) -> Key:
        """The key that `hex()` wrote."""
        return cls(bytes.fromhex(text))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A new `torch.Generator` on `device`, seeded from this key."""
        generator = torch.Generator(device=device)
        self._seed(generator)
        return generator

    @contextmanager
    def scope(self, device: torch.device | str = "cpu") -> Iterator[None]:
        """Run a body with torch's own RNG (CPU and `device`) seeded from this key, then put the ambient RNG back.

        >>> import torch, purestep as ps
        >>> with ps.key(0).scope():
        ...     a = torch.rand(2)
        >>> with ps.key(0).scope():
        ...     b = torch.rand(2)
        >>> torch.equal(a, b)
        True
        """
        generators = [torch.default_generator]
        device = torch.device(device)
        if device.type != "cpu":
            generators.append(_default_generator(device))
        ambient = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                self._seed(generator)
            yield
        finally:
            for generator, state in zip(generators, ambient, strict=True):
                generator.set_state(state)

    def _seed(self, generator: torch.Generator) -> None:
        generator.manual_seed(self.seed)
        if generator.device.type == "cpu":
            # manual_seed keeps 32 bits on the CPU (at::mt19937): two of a long run's keys would soon share a stream.
            # The twister's own state takes the whole key; tests/state/test_keys.py pins this layout.
            state = generator.get_state()
            words = state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].view(torch.int64)
            stream = hashlib.shake_128(self.data).digest(4 * _MT_WORDS)
            words.copy_(torch.frombuffer(bytearray(stream), dtype=torch.int32)).bitwise_and_(0xFFFFFFFF)
            generator.set_state(state)


def key(seed: int) -> Key:
    """The base key of a run.

    Args:
        seed: an integer from 0 to 2**64 - 1.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `seed` is out of range.

    >>> import purestep as ps
    >>> ps.key(7) == ps.key(7)
    True
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    seed = operator.index(seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
    return Key(_hash(b"\0" * _SIZE, _encode(seed), b"key"))


def _hash(parent: bytes, data: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SIZE, key=parent, person=b"ps." + purpose).digest()


def _encode(datum: Any) -> bytes:
    if isinstance(datum, str):
        return b"s" + datum.encode()
    if isinstance(datum, bool) or not hasattr(datum, "__index__"):
        raise TypeError(f"fold_in takes integers and strings, got {datum!r}")
    return b"i%d" % operator.index(datum)


def _default_generator(device: torch.device) -> torch.Generator:
    module = torch.get_device_module(device)
    if device.type == "mps":
        return module._get_default_mps_generator()
    module.init()
    return module.default_generators[module.current_device() if device.index is None else device.index]
