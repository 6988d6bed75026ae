"""Arithmetic of a packed stream cut into equal contiguous slices, one a context-parallel rank. No tensors here."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from k3train.errors import LayoutError


def rounded_up(count: int, least: int = 1) -> int:
    """The next power of two of a count above 0, and no less than `least`, itself one.

    Kernels, libraries and captured graphs are planned anew for every number of documents and every bound on their length:
    rounded, few numbers occur.
    """
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class Slice:
    """Tokens [rank * length, (rank + 1) * length) of the stream.

    pieces: borders 0 < ... < length of the documents inside, counted from the slice's start.
    first_source: the first rank that holds tokens of the document this slice begins in; `rank` if it begins here.
    last_reader: the last rank that holds tokens of the document this slice ends in; `rank` if it ends here.
    crossed: some document crosses a border between ranks, so that all ranks take part in the exchanges.
    """

    rank: int
    size: int
    length: int
    pieces: tuple[int, ...]
    first_source: int
    last_reader: int
    document_start: int  # global position of the first token of the document this slice begins in
    crossed: bool

    @property
    def start(self) -> int:
        return self.rank * self.length

    @property
    def continues(self) -> bool:
        """The first token's document began on a rank before."""
        return self.first_source < self.rank

    @property
    def leaves(self) -> bool:
        """The last token's document goes on on the next rank."""
        return self.last_reader > self.rank

    @property
    def mirror(self) -> int:
        return self.size - 1 - self.rank

    def history(self, count: int) -> list[int]:
        """Where the `count` tokens before this slice lie, oldest first: (rank * kept + place) in the last
        `kept = min(count, length)` tokens of every rank laid end to end; -1 for one of another document."""
        kept = min(count, self.length)
        places = []
        for position in range(self.start - count, self.start):
            owner, inside = divmod(position, self.length)
            places.append(owner * kept + inside - (self.length - kept) if position >= self.document_start else -1)
        return places


def cut(bounds: Sequence[int], size: int, rank: int) -> Slice:
    """The slice of `rank` of `size`; bounds 0 <= ... <= T are the document borders of the whole stream.

    Raises LayoutError when the stream does not divide.
    """
    total = bounds[-1]
    if total == 0 or total % size:
        raise LayoutError(
            f"a stream of {total} tokens does not divide over parallel.context={size} ranks; "
            f"make train.seq_length * train.micro_batch a multiple of {size}"
        )
    length = total // size
    start, end = rank * length, (rank + 1) * length
    borders = sorted(set(bounds) | {0, total})
    inside = borders[bisect_right(borders, start) : bisect_left(borders, end)]
    document_start = borders[bisect_right(borders, start) - 1]
    document_end = borders[bisect_left(borders, end)]
    known = set(borders)
    return Slice(
        rank=rank, size=size, length=length, pieces=(0, *[b - start for b in inside], length),
        first_source=document_start // length, last_reader=(document_end - 1) // length,
        document_start=document_start, crossed=any(r * length not in known for r in range(1, size)),
    )  # fmt: skip


@dataclass(frozen=True)
class QueryBlock:
    """Query rows [first, last) of the stream and the document pieces among them, as
    (first row, last row, first key): row t of a piece sees keys [first key, t]. All positions are global."""

    first: int
    last: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def first_key(self) -> int:
        return self.pieces[0][2]

    @property
    def pairs(self) -> int:
        """Query-key pairs inside: the work of the attention core."""
        return sum((b - a) * (a - k) + (b - a) * (b - a + 1) // 2 for a, b, k in self.pieces)


def query_block(bounds: Sequence[int], first: int, last: int) -> QueryBlock:
    """The pieces of the rows [first, last), which are not empty."""
    borders = sorted(set(bounds))
    pieces, row = [], first
    while row < last:
        after = bisect_right(borders, row)
        end = min(borders[after], last)
        pieces.append((row, end, borders[after - 1]))
        row = end
    return QueryBlock(first, last, tuple(pieces))


def swapped_ranges(total: int, size: int, rank: int) -> list[tuple[int, int]]:
    """The rows a rank attends for: the first half of its own slice and the second half of its mirror's.

    Rank r and its mirror size-1-r then have equal work under a causal mask (one long document): the halves
    2r and 2(size-1-r)+1 of 2 * size. Empty ranges (slices of one token) are left out.
    """
    length = total // size
    kept = length - length // 2
    own, mirror = rank * length, (size - 1 - rank) * length
    return [(a, b) for a, b in ((own, own + kept), (mirror + kept, mirror + length)) if a < b]


def swapped_blocks(bounds: Sequence[int], size: int, rank: int) -> list[QueryBlock]:
    """The `swapped_ranges` of a rank with the document pieces in them."""
    return [query_block(bounds, a, b) for a, b in swapped_ranges(bounds[-1], size, rank)]


def own_block(bounds: Sequence[int], size: int, rank: int) -> QueryBlock:
    """All rows of a rank's own slice."""
    length = bounds[-1] // size
    return query_block(bounds, rank * length, (rank + 1) * length)


ROW_PAIRS = 2000
"""How many query-key pairs take as long as a query row on its way to another rank and its output on the way back.

With H heads of K + V channels, a pair is 7 H (K + V) operations (forward and the recomputing backward) and a row moves
2 H (K + V) bytes two or three times: 7 / 500e12 s and 5 / 150e9 s, by the rates of two H200s in benchmarks/RESULTS.md.
"""


def swap_pays(bounds: Sequence[int], size: int) -> bool:
    """Whether trading halves (`swapped_ranges`) shortens the longest rank's attention by more than the trade takes.

    It does for long documents, whose last rows see many keys; many short ones are even work as they lie. The same on
    every rank, since all know all borders.
    """
    whole = max(own_block(bounds, size, r).pairs for r in range(size))
    halves = max(sum(b.pairs for b in swapped_blocks(bounds, size, r)) for r in range(size))
    return whole - halves > ROW_PAIRS * (bounds[-1] // size // 2)


@dataclass(frozen=True)
class Spans:
    """Bounds on documents that the shapes of a captured step may follow, in tokens: few values, the same on every rank.

    border: of a document that crosses a border between slices, what lies on either side of it; the length of a slice
    where such a part may be longer, or where trading rows pays. longest: of any document; the whole stream: no bound.
    """

    border: int
    longest: int

    def covering(self, other: Spans) -> Spans:
        """Bounds for both."""
        return Spans(max(self.border, other.border), max(self.longest, other.longest))


BORDER_SHARES = (8, 4, 2)
LONGEST_SHARES = (2, 1)
"""Bounds are a slice's length over one of these: each combination that occurs is a graph of its own."""


def spans(bounds: Sequence[int], size: int) -> Spans:
    """The least bounds that hold for a stream with these document borders, cut into `size` equal slices."""
    total = bounds[-1]
    length = total // size
    documents = [(a, b) for a, b in itertools.pairwise(sorted({0, *bounds})) if a < b]
    starts = [a for a, _ in documents]
    parts = [0]
    for edge in range(length, total, length):
        a, b = documents[bisect_right(starts, edge) - 1]
        if a < edge:
            parts += [edge - a, b - edge]

    def least(needed: int, shares: Sequence[int], otherwise: int) -> int:
        return next((bound for share in shares if (bound := -(-length // share)) >= needed), otherwise)

    border = length if swap_pays(bounds, size) else least(max(parts), BORDER_SHARES, length)
    return Spans(border, least(max(b - a for a, b in documents), LONGEST_SHARES, total))
