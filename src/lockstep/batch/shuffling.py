"""Shuffles a dataset: computes a permutation of its indices from only the seed and the epoch.

For up to `MAX_LENGTH_DRAWN_WHOLE` samples the whole permutation is drawn, so all orders are equally
likely. For a larger dataset, `permuted_indices` computes only the indices at a range of *places* of
the order, so that time and memory do not depend on the length of the dataset.

The algorithm is a generalized Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers
with Arbitrary Finite Domains", methods 2 and 3). A place is a cell of a table whose numbers of rows
and columns are each about the square root of the length. The first round moves every cell along its
row, by a distance that depends on the row and a key; the next one along its column, and so on. Each
round can be undone, so the rounds together permute the cells. The table may have some more cells
than there are indices (less than one row). A place that is moved to one of these is moved again,
until it arrives at an index. The distances are outputs of SplitMix64 (Steele et al. 2014).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lockstep.batch.indices import Indices, ceil_div

Words = npt.NDArray[np.uint64]

MAX_LENGTH_DRAWN_WHOLE = 2**14
NUM_ROUNDS = 6
"""An even number, so that the last round is along the columns."""

# The constants of SplitMix64. They are numpy's, because Python's would change the dtype.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1 = np.uint64(30)
_SHIFT_2 = np.uint64(27)
_SHIFT_3 = np.uint64(31)
_HALF_WORD = np.uint64(32)


def random_words(seed: int, epoch: int, count: int) -> Words:
    """Returns random 64-bit words, the same on every machine and with every version of numpy.

    numpy promises stable streams for the raw output of its bit generators, not for
    `Generator.permutation` (NEP 19); a run resumed next year must see the same order.

    Args:
        seed: seed of the run, from 0 to 2**64 - 1.
        epoch: number of the epoch; each epoch has different words.
        count: number of words.
    """
    # A SeedSequence takes words of 32 bits.
    low_word = seed & 0xFFFFFFFF
    high_word = seed >> 32
    generator = np.random.Philox(np.random.SeedSequence([low_word, epoch, high_word]))
    return generator.random_raw(count)


def shuffled_indices(length: int, *, seed: int, epoch: int) -> Indices:
    """Returns a random permutation of `range(length)`, drawn as a whole."""
    # Each index gets a random word; sorted by these words, the indices are in random order.
    words = random_words(seed, epoch, length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def is_shuffled_in_slices(length: int) -> bool:
    """Returns True if the order of a dataset of this length comes from `permuted_indices`.

    The order of a shorter one is drawn as a whole, since the algorithm of `permuted_indices` cannot
    give all orders of a handful of indices equally often.
    """
    return length > MAX_LENGTH_DRAWN_WHOLE


def permuted_indices(begin: int, end: int, length: int, keys: Words) -> Indices:
    """Returns the indices at the places `begin` to `end - 1` of the permuted order.

    The places and the indices are the cells of a table. Moving the cells gives the order: the cell
    to which place p is moved is the index at place p. The table may have more cells than there are
    indices; a place that is moved to such a cell is moved again. For example, with 5 indices in a
    table of 6 cells, place 2 is moved to cell 5, which is no index, and from there to cell 3: place
    2 of the order has index 3.

    Args:
        begin: first place, at least 0.
        end: the place after the last one, at most `length`.
        length: length of the dataset, from 1 to `sys.maxsize`.
        keys: one random word for each round; their number is even.

    Returns:
        The indices, of shape `(end - begin,)`.
    """
    places = np.arange(begin, end, dtype=np.uint64)
    indices = _move_cells(places, length, keys)

    # Move places again until they arrive at an index ("cycle walking").
    while True:
        outside = np.flatnonzero(indices >= np.uint64(length))
        if len(outside) == 0:
            return indices.astype(np.int64)
        indices[outside] = _move_cells(indices[outside], length, keys)


def _move_cells(cells: Words, length: int, keys: Words) -> Words:
    """Moves cells of the table through all rounds of the Feistel network.

    The first round moves each cell along its row, by a distance that is computed from the number of
    the row and a key. The second round moves it along its column, and so on in turn.

    Args:
        cells: numbers of the cells, of shape `(n,)`; the table is numbered row by row.
        length: length of the dataset.
        keys: one word for each round; their number is even.

    Returns:
        The numbers of the cells to which they are moved, of shape `(n,)`.
    """
    num_columns = math.isqrt(length - 1) + 1  # the square root of `length`, rounded up
    num_rows = ceil_div(length, num_columns)

    # In each round one coordinate of a cell moves by a distance that depends on the other one. In
    # the first round `moving` is the column and `fixed` is the row; then they are swapped.
    moving_size = np.uint64(num_columns)
    fixed_size = np.uint64(num_rows)
    fixed = cells // moving_size
    moving = cells - fixed * moving_size

    distance = np.empty_like(cells)
    scratch = np.empty_like(cells)
    for key in keys:
        # SplitMix64, computed in place: output number `fixed` of the generator with seed `key`.
        np.multiply(fixed, _GAMMA, out=distance)
        distance += key
        distance ^= np.right_shift(distance, _SHIFT_1, out=scratch)
        distance *= _MULTIPLIER_1
        distance ^= np.right_shift(distance, _SHIFT_2, out=scratch)
        distance *= _MULTIPLIER_2
        distance ^= np.right_shift(distance, _SHIFT_3, out=scratch)

        # The upper 32 bits, scaled to a number from 0 to `moving_size - 1`:
        # distance = (distance >> 32) * moving_size >> 32
        distance >>= _HALF_WORD
        distance *= moving_size
        distance >>= _HALF_WORD

        # moving = (moving + distance) % moving_size, without a division. The sum is less than
        # 2 * moving_size. If it is less than moving_size, the subtraction wraps around to a very
        # large number, so that the minimum is the sum itself.
        moving += distance
        np.subtract(moving, moving_size, out=scratch)
        np.minimum(moving, scratch, out=moving)

        moving, fixed = fixed, moving
        moving_size, fixed_size = fixed_size, moving_size

    # After an even number of rounds `moving` is the column again, and `fixed` the row.
    return fixed * moving_size + moving
