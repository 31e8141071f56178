import numpy as np
import pytest
import torch
from torch import nn

from atoll.kernel.randomness import Keys, default_generator, generator, moves_default_generator, number


def keys(clients, seed=0, purpose="batches", *counters):
    return Keys.of(torch.tensor(clients), seed, purpose, *counters)


def words(some):
    return list(zip(some.low.tolist(), some.high.tolist(), strict=True))


def test_a_client_has_the_same_key_alone_and_among_others():
    among = words(keys([0, 3, 7, 100_000], 1, "batches", 2, "main"))
    alone = [words(keys([client], 1, "batches", 2, "main"))[0] for client in (0, 3, 7, 100_000)]
    assert among == alone


def test_keys_differ_by_seed_purpose_and_every_counter():
    variants = [
        (0, "batches", 0, "main"), (1, "batches", 0, "main"), (0, "dropout", 0, "main"),
        (0, "batches", 1, "main"), (0, "batches", 0, "tune"), (0, "batches", 0),
    ]  # fmt: skip
    found = [word for variant in variants for word in words(keys(list(range(100)), *variant))]
    assert len(set(found)) == len(variants) * 100


def test_counters_do_not_run_together():
    assert number(1, "a", 1, 12) != number(1, "a", 11, 2)
    assert number(1, "a", "b") != number(1, "ab")


def test_folding_gives_keys_of_their_own():
    start = keys([5])
    folded = [words(start.fold(counter))[0] for counter in range(1000)]
    assert len(set(folded)) == 1000
    assert words(start.fold(torch.tensor(3))) == words(start.fold(3))


def test_a_million_clients_have_different_keys():
    many = Keys.of(torch.arange(1_000_000), 0, "batches", 0, "main")
    assert len(torch.unique(many.low * 2**31 + (many.high >> 1))) == 1_000_000


def in_whole_numbers(word):
    """The hash with numbers of any size, cut to 32 bits."""
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0x735A2D97 % 2**32
    return word ^ word >> 15


@pytest.mark.parametrize("low", [0, 1, 0x89ABCDEF, 2**31, 2**32 - 1])
@pytest.mark.parametrize("high", [0, 0x12345678, 2**32 - 1])
def test_words_are_those_of_whole_numbers_cut_to_32_bits(low, high):
    keys = Keys(torch.tensor(low), torch.tensor(high))
    counters = [0, 1, 77_777, 2**31, 2**32 - 1]
    expected = [in_whole_numbers(in_whole_numbers(counter ^ low) ^ high) for counter in counters]
    assert keys.bits(torch.tensor(counters)).tolist() == expected
    assert keys.uniform(torch.tensor(counters), torch.float64).tolist() == [bits // 256 / 2**24 for bits in expected]
    for counter in counters:
        for folded in (keys.fold(counter), keys.fold(torch.tensor(counter))):
            first = in_whole_numbers(low ^ counter)
            second = in_whole_numbers(high ^ (first + counter) % 2**32)
            assert (folded.low.item(), folded.high.item()) == (first, second)


def test_bits_look_uniform_in_every_byte():
    # 2^16 draws in 256 cells of 256 each: chi-square has 255 degrees of freedom, so 255 +- 6 sqrt(510) holds all but
    # one sample in 10^8.
    bits = keys([7]).bits(torch.arange(2**16))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 255, minlength=256).double()
        chi_square = ((counts - 256) ** 2 / 256).sum().item()
        assert abs(chi_square - 255) < 6 * 510**0.5


def test_bits_of_neighbouring_clients_are_unrelated():
    # The share of equal bits between two independent streams of n = 32 * 4096 bits is 1/2 with deviation 1/(2 sqrt n).
    first, second = keys([1]).bits(torch.arange(4096)), keys([2]).bits(torch.arange(4096))
    different = sum(((first ^ second) >> bit & 1).sum().item() for bit in range(32))
    assert abs(different / (32 * 4096) - 0.5) < 6 / (2 * (32 * 4096) ** 0.5)


def test_generators_repeat_and_differ():
    assert (
        generator(0, "cohort", 3).integers(1000, size=4).tolist()
        == generator(0, "cohort", 3).integers(1000, size=4).tolist()
    )
    assert generator(0, "cohort", 3).random() != generator(0, "cohort", 4).random()
    assert sorted(generator(0, "split", 1).permutation(50).tolist()) == list(range(50))


def test_the_default_generator_is_lent_and_given_back():
    before = torch.random.get_rng_state()
    with default_generator(5):
        first = torch.rand(3)
    with default_generator(5):
        assert torch.equal(torch.rand(3), first)
    with default_generator(6):
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_default_generator_is_given_back_after_an_error():
    before = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError), default_generator(5):
        torch.rand(1) / (1 // 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_keys_of_64_bits_fit_the_default_generator():
    with default_generator(2**64 - 1):
        nn.Linear(2, 2)


def test_drawing_is_noticed_and_undone():
    before = torch.random.get_rng_state()
    assert moves_default_generator(lambda: torch.rand(1))
    assert not moves_default_generator(lambda: torch.ones(1))
    assert not moves_default_generator(lambda: np.ones(1))
    assert torch.equal(torch.random.get_rng_state(), before)
