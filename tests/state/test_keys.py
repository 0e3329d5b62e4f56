"""Keys: what they refuse, that derived keys do not meet, and what their generators draw."""

import copy
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from purestep.state import Key, key
from purestep.state.keys import _MT_OFFSET, _MT_WORDS

# What a run asks of keys: (derivation, derivation) pairs that must differ.
PAIRS = {
    "seed 0 rank 1, seed 1 rank 0": (key(0).fold_in(1), key(1).fold_in(0)),
    "step 1 microbatch 2, step 2 microbatch 1": (key(0).fold_in(1, 2), key(0).fold_in(2, 1)),
    "an integer, its text": (key(0).fold_in(1), key(0).fold_in("1")),
    "12 in one, in two": (key(0).fold_in("12"), key(0).fold_in("1", "2")),
    "one fold, none": (key(0).fold_in(0), key(0)),
    "fold_in, split": (key(0).fold_in(0), key(0).split(1)[0]),
    "fold_in 0, seed 0": (key(0).fold_in(0), Key(bytes(16)).fold_in(0)),
    "a number, its negative": (key(0).fold_in(1), key(0).fold_in(-1)),
    "beyond 64 bits": (key(0).fold_in(2**64 + 1), key(0).fold_in(1)),
    "an empty string, none": (key(0).fold_in(""), key(0)),
    "seeds that agree in 32 bits": (key(5), key(5 + 2**32)),
    "the two ends": (key(0), key(2**64 - 1)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_keys_that_came_by_different_roads_differ(name):
    first, second = PAIRS[name]
    assert first != second
    assert first.seed != second.seed
    assert not torch.equal(draw(first), draw(second))


def test_a_key_is_a_function_of_its_road():
    assert key(3) == key(3)
    assert key(3).fold_in("data", 7) == key(3).fold_in("data").fold_in(7)
    assert key(3).fold_in() == key(3)
    assert key(3).split(5)[:2] == key(3).split(2)
    assert key(np.int64(3)) == key(3)
    assert key(0).fold_in(np.int32(3)) == key(0).fold_in(3)
    assert key(0).fold_in(torch.tensor(3)) == key(0).fold_in(3)


def test_no_two_of_many_derived_keys_are_equal():
    steps = [key(seed).fold_in(step) for seed in range(4) for step in range(5_000)]
    keys = [k for step in steps for k in (step, step.fold_in(0), step.fold_in(1), *step.split(2))]
    assert len(keys) == 100_000
    assert len(set(keys)) == len(keys)
    assert len({k.seed for k in keys}) == len(keys)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**64 + 1, -(2**70)])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match=rf"from 0 to 2\*\*64 - 1, got {seed}"):
        key(seed)


@pytest.mark.parametrize("seed", [True, False, 1.0, "1", None, b"1", [1]])
def test_seeds_that_are_no_integers_are_refused(seed):
    with pytest.raises(TypeError, match="seed must be an integer, got"):
        key(seed)


@pytest.mark.parametrize("datum", [True, 1.5, None, b"a", ("a",)])
def test_fold_in_takes_integers_and_strings_only(datum):
    with pytest.raises(TypeError, match="fold_in takes integers and strings, got"):
        key(0).fold_in(datum)


@pytest.mark.parametrize("num", [0, -1])
def test_split_needs_a_positive_number(num):
    with pytest.raises(ValueError, match=f"positive number of keys, got {num}"):
        key(0).split(num)


@pytest.mark.parametrize("data", [b"", bytes(15), bytes(17), "0" * 16, bytearray(16), 0])
def test_a_key_holds_16_bytes(data):
    with pytest.raises(ValueError, match=r"a Key holds 16 bytes, got .*ps\.key\(seed\)"):
        Key(data)


def test_text_and_copies_keep_the_key():
    k = key(1).fold_in("x")
    assert Key.from_hex(k.hex()) == k
    assert len(k.hex()) == 32
    assert pickle.loads(pickle.dumps(k)) == copy.deepcopy(k) == k
    assert {k: 1}[Key(k.data)] == 1
    with pytest.raises(AttributeError):
        k.data = bytes(16)


def test_seed_fits_64_bits_and_uses_them():
    seeds = [key(0).fold_in(i).seed for i in range(1_000)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    for bit in range(64):
        assert 350 < sum(seed >> bit & 1 for seed in seeds) < 650


# --- scope -----------------------------------------------------------------------------------------------------------


def test_scope_draws_from_the_key_and_puts_the_ambient_rng_back():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    torch.rand(1_000)
    with key(0).scope():
        first = torch.rand(5)
    torch.manual_seed(11)
    with key(0).scope():
        second = torch.rand(5)
    assert torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)


def test_scope_puts_the_ambient_rng_back_after_an_exception():
    torch.manual_seed(11)
    torch.randn(1)  # a cached second normal is part of the state
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), key(0).scope():
        torch.rand(5).numel() // 0
    assert torch.equal(torch.get_rng_state(), before)


def test_scopes_nest():
    with key(0).scope():
        plain = torch.rand(4)
    with key(0).scope():
        nested = [torch.rand(2)]
        with key(1).scope():
            torch.rand(7)
        nested.append(torch.rand(2))
    assert torch.equal(torch.cat(nested), plain)


def test_scope_and_generator_draw_the_same():
    with key(4).scope():
        inside = torch.randn(9)
    assert torch.equal(inside, torch.randn(9, generator=key(4).generator()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_scope_and_generator_on_cuda():
    torch.rand(3, device="cuda")
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    with key(0).scope("cuda"):
        inside = torch.rand(5, device="cuda")
        host = torch.rand(5)
    assert torch.equal(inside, torch.rand(5, device="cuda", generator=key(0).generator("cuda")))
    assert torch.equal(host, torch.rand(5, generator=key(0).generator()))
    assert torch.equal(torch.get_rng_state(), cpu)
    assert torch.equal(torch.cuda.get_rng_state(), cuda)


# --- the stream ------------------------------------------------------------------------------------------------------


def test_generators_of_seeds_that_agree_in_32_bits_differ():
    """`manual_seed` alone would give both the same stream: that is why the whole key goes into the twister."""
    low = 12345
    ours, theirs = (torch.Generator() for _ in range(2))
    ours.manual_seed(low)
    theirs.manual_seed(low + 2**32)
    assert torch.equal(torch.rand(8, generator=ours), torch.rand(8, generator=theirs))
    first, second = (FixedSeed(key(i).data) for i in range(2))
    assert first.seed == second.seed
    assert not torch.equal(draw(first), draw(second))


def test_a_generator_is_used_from_its_start():
    k = key(0)
    used = k.generator()
    torch.randn(1_001, generator=used)
    assert torch.equal(draw(k), torch.rand(64, generator=k.generator()))
    assert k.generator().initial_seed() == k.seed


def test_canary_layout_of_the_cpu_generators_state():
    """keys.py writes a Mersenne Twister's words into torch's generator state. If this fails, torch moved them.

    NumPy's twister is the reference: seeded alike, both hold the same words; given the same words, both draw the same.
    """
    seeded = torch.Generator()
    seeded.manual_seed(5)
    reference = np.random.MT19937()
    reference._legacy_seeding(5)
    assert words_of(seeded) == reference.state["state"]["key"].tolist()

    generator = key(0).generator()
    words = words_of(generator)
    assert len(set(words)) > _MT_WORDS - 5
    reference.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, np.uint32), "pos": _MT_WORDS}}
    drawn = torch.empty(2_000, dtype=torch.int32).random_(generator=generator).tolist()
    assert drawn == [int(x) & 0x7FFFFFFF for x in reference.random_raw(2_000)]


def test_the_stream_is_uniform_and_normal_enough():
    n = 200_000
    uniform = torch.rand(n, dtype=torch.float64, generator=key(0).generator())
    counts = torch.histc(uniform, bins=100, min=0, max=1)
    assert chi_square(counts, n / 100) < 99 + 6 * math.sqrt(2 * 99)
    normal = torch.randn(n, dtype=torch.float64, generator=key(0).generator())
    assert abs(normal.mean()) < 6 / math.sqrt(n)
    assert abs(normal.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs((normal[1:] * normal[:-1]).mean()) < 6 / math.sqrt(n)


def test_first_draws_of_consecutive_steps_are_independent():
    """A weak derivation shows in the first number of step k against step k + 1, and in masks of two ranks."""
    n = 4_000
    first = torch.stack([torch.rand(2, dtype=torch.float64, generator=key(0).fold_in(k).generator()) for k in range(n)])
    counts = torch.histc(first[:, 0], bins=20, min=0, max=1)
    assert chi_square(counts, n / 20) < 19 + 6 * math.sqrt(2 * 19)
    centred = (first - 0.5) * math.sqrt(12)
    for x, y in [(centred[1:, 0], centred[:-1, 0]), (centred[:, 0], centred[:, 1])]:
        assert abs((x * y).mean()) < 6 / math.sqrt(n)
    masks = Counter(tuple((draw(key(0).fold_in(1, rank)) < 0.5).tolist()) for rank in range(64))
    assert max(masks.values()) == 1


class FixedSeed(Key):
    """A key whose 64-bit seed is always the same: only the twister's words can tell two of them apart."""

    __slots__ = ()

    @property
    def seed(self) -> int:
        return 7


def draw(k: Key) -> torch.Tensor:
    return torch.rand(64, generator=k.generator())


def words_of(generator: torch.Generator) -> list[int]:
    state = generator.get_state()
    return state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].clone().view(torch.int64).tolist()


def chi_square(counts: torch.Tensor, expected: float) -> float:
    return ((counts - expected) ** 2 / expected).sum().item()
