"""The Triton kernels of `common.attention.triton`. Importing this needs triton.

A row is one head of one token. Its arithmetic is the same whichever kernel runs it: from position 0 its context
is cut into splits of SPLIT tokens and those into tiles of TILE; tiles accumulate in order inside a split, splits
are merged in order (`_merged`), in registers (`attend_rows`) or from memory (`attend_split`, then `combine`).
A tile or split that a row sees nothing of changes no bit of it, so it may be computed or left out.

Everything else that could depend on how rows are grouped is kept out: the sum of weights is a product with ones
rather than a reduction (whose order follows the layout of threads), a maximum is exact in any order, and the
launches forbid contracting a product and a sum (`enable_fp_fusion=False`). What is left is the matrix product
itself: with fewer than 64 rows Triton takes the same instruction for any number of them, with 64 or more it may
take another (wgmma on Hopper), whose last bits nobody promises.
"""

# ruff: noqa: SIM102, SIM108 - an `if` on a constant chooses code, so it stands alone and binds its names inside

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels below run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 before the first import)."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def store(
    key,  # [num_tokens, KV_HEADS, K_DIM]
    value,  # [num_tokens, KV_HEADS, V_DIM]
    pool,
    block_stride,
    k_offset,
    v_offset,
    row_blocks,
    row_offsets,
    num_rows,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of the step into the pool. Grid: [ceil(num_rows / ROWS)]. K_ROW and V_ROW: a row's elements, padded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    block = tl.load(row_blocks + row, mask=real, other=0).to(tl.int64) * block_stride
    offset = tl.load(row_offsets + row, mask=real, other=0)
    row = row.to(tl.int64)
    _store_part(key, pool + k_offset, row, real, block, offset, BLOCK_SIZE, KV_HEADS, K_DIM, K_ROW)
    _store_part(value, pool + v_offset, row, real, block, offset, BLOCK_SIZE, KV_HEADS, V_DIM, V_ROW)


@triton.jit
def _store_part(
    rows,
    base,
    row,
    real,
    block,
    offset,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
):
    """Keys or values of rows [.., KV_HEADS, DIM] to their places in a layer that begins at `base` of block 0."""
    element = tl.arange(0, ROW)
    mask = real[:, None] & (element < KV_HEADS * DIM)[None, :]
    found = tl.load(rows + row[:, None] * (KV_HEADS * DIM) + element[None, :], mask=mask, other=0.0)
    in_block = (element // DIM * (BLOCK_SIZE * DIM) + element % DIM)[None, :] + offset[:, None] * DIM
    tl.store(base + block[:, None] + in_block, found.to(tl.float32).to(base.dtype.element_ty), mask=mask)


@triton.jit
def attend_rows(
    query,  # [num_tokens, num_heads, K_DIM]
    out,  # [num_tokens, num_heads, V_DIM]
    pool, block_stride, k_offset, v_offset,
    starts, context_lens, tables, table_stride, sinks, num_seqs, scale,
    SKIP_SINGLE: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one sequence over their whole context. Grid: [num_rows * GROUP // ROWS + num_seqs, KV_HEADS].

    SKIP_SINGLE leaves sequences of one token to `attend_split`.
    """
    kv_head = tl.program_id(1)
    seq, tile = _tile_of(tl.program_id(0), starts, num_seqs, GROUP, ROWS)
    start = tl.load(starts + seq)
    num_tokens = tl.load(starts + seq + 1) - start
    first_row = tile * ROWS
    if first_row >= num_tokens * GROUP:
        return
    if SKIP_SINGLE:
        if num_tokens == 1:
            return
    context = tl.load(context_lens + seq)
    row = first_row + tl.arange(0, ROWS)
    real = row < num_tokens * GROUP
    head = kv_head * GROUP + row % GROUP
    position = tl.where(real, context - num_tokens + row // GROUP, -1)
    at = (start + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + head
    q = _queries(query, at, real, K_DIM, K_PAD)
    begin = _first_tile(context - num_tokens + first_row // GROUP, WINDOW, TILE)
    end = tl.minimum(context, context - num_tokens + (first_row + ROWS - 1) // GROUP + 1)
    total_m = tl.full([ROWS], float("-inf"), tl.float32)
    total_mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, V_PAD], tl.float32)
    for split in range(begin // SPLIT, (end + SPLIT - 1) // SPLIT):
        m, mass, acc = _one_split(
            q, position, tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT), context,
            tables + seq.to(tl.int64) * table_stride,
            pool + k_offset + kv_head * BLOCK_SIZE * K_DIM, pool + v_offset + kv_head * BLOCK_SIZE * V_DIM,
            block_stride, scale,
            BLOCK_SIZE, K_DIM, V_DIM, K_PAD, V_PAD, WINDOW, SOFTCAP, ROUND, WIDE, ROWS, TILE,
        )  # fmt: skip
        total_m, total_mass, total = _merged(total_m, total_mass, total, m, mass, acc)
    if SINKS:
        total_m, total_mass, total = _sunk(total_m, total_mass, total, tl.load(sinks + head))
    _write(out, at, real, total_mass, total, V_DIM, V_PAD)


@triton.jit
def attend_split(
    query,
    part_m,  # [num_seqs, num_heads, num_splits], likewise part_mass
    part_mass,
    part,  # [num_seqs, num_heads, num_splits, V_PAD]
    pool, block_stride, k_offset, v_offset,
    starts, context_lens, tables, table_stride, num_splits, scale,
    GROUP_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split for the heads of a group, for sequences of one token.

    Grid: [num_splits, KV_HEADS * GROUP_TILES, num_seqs].
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1) // GROUP_TILES
    seq = tl.program_id(2)
    start = tl.load(starts + seq)
    if tl.load(starts + seq + 1) - start != 1:
        return
    context = tl.load(context_lens + seq)
    begin = _first_tile(context - 1, WINDOW, TILE)
    first = tl.maximum(begin, split * SPLIT)
    last = tl.minimum(context, (split + 1) * SPLIT)
    if first >= last:
        return
    row = (tl.program_id(1) % GROUP_TILES) * ROWS + tl.arange(0, ROWS)
    real = row < GROUP
    head = kv_head * GROUP + row
    position = tl.where(real, context - 1, -1)
    at = start.to(tl.int64) * (KV_HEADS * GROUP) + head
    q = _queries(query, at, real, K_DIM, K_PAD)
    m, mass, acc = _one_split(
        q, position, first, last, context, tables + seq.to(tl.int64) * table_stride,
        pool + k_offset + kv_head * BLOCK_SIZE * K_DIM, pool + v_offset + kv_head * BLOCK_SIZE * V_DIM,
        block_stride, scale,
        BLOCK_SIZE, K_DIM, V_DIM, K_PAD, V_PAD, WINDOW, SOFTCAP, ROUND, WIDE, ROWS, TILE,
    )  # fmt: skip
    cell = (seq.to(tl.int64) * (KV_HEADS * GROUP) + head) * num_splits + split
    tl.store(part_m + cell, m, mask=real)
    tl.store(part_mass + cell, mass, mask=real)
    dim = tl.arange(0, V_PAD)
    tl.store(part + cell[:, None] * V_PAD + dim[None, :], acc, mask=real[:, None] & (dim < V_DIM)[None, :])


@triton.jit
def combine(
    part_m,
    part_mass,
    part,
    out,
    starts,
    context_lens,
    sinks,
    num_splits,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
):
    """What `attend_split` left, merged in order of position. Grid: [num_seqs, ceil(NUM_HEADS / HEADS)]."""
    seq = tl.program_id(0)
    start = tl.load(starts + seq)
    if tl.load(starts + seq + 1) - start != 1:
        return
    context = tl.load(context_lens + seq)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < NUM_HEADS
    dim = tl.arange(0, V_PAD)
    stored = real[:, None] & (dim < V_DIM)[None, :]
    total_m = tl.full([HEADS], float("-inf"), tl.float32)
    total_mass = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([HEADS, V_PAD], tl.float32)
    for split in range(_first_tile(context - 1, WINDOW, TILE) // SPLIT, (context + SPLIT - 1) // SPLIT):
        cell = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        m = tl.load(part_m + cell, mask=real, other=float("-inf"))
        mass = tl.load(part_mass + cell, mask=real, other=0.0)
        acc = tl.load(part + cell[:, None] * V_PAD + dim[None, :], mask=stored, other=0.0)
        total_m, total_mass, total = _merged(total_m, total_mass, total, m, mass, acc)
    if SINKS:
        total_m, total_mass, total = _sunk(total_m, total_mass, total, tl.load(sinks + head, mask=real, other=0.0))
    _write(out, start.to(tl.int64) * NUM_HEADS + head, real, total_mass, total, V_DIM, V_PAD)


@triton.jit
def _tile_of(tile_id, starts, num_seqs, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Which sequence a tile of rows belongs to, and which of its tiles it is; found without asking the host.

    Sequence s owns the ids from `starts[s] * GROUP // ROWS + s` on: at least as many as it has tiles.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) * GROUP // ROWS + middle <= tile_id:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    return seq, tile_id - (tl.load(starts + seq) * GROUP // ROWS + seq)


@triton.jit
def _queries(query, at, real, K_DIM: tl.constexpr, K_PAD: tl.constexpr):
    """Rows `at` of query [.., K_DIM], as [rows, K_PAD]."""
    dim = tl.arange(0, K_PAD)
    return tl.load(query + at[:, None] * K_DIM + dim[None, :], mask=real[:, None] & (dim < K_DIM)[None, :], other=0.0)


@triton.jit
def _first_tile(position, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Where the tile begins that holds the oldest position which a row at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    return first


@triton.jit
def _one_split(
    q,  # [ROWS, K_PAD]
    position,  # [ROWS]; -1 for a row that is none
    first,  # a multiple of TILE
    last, context, table, k_base, v_base, block_stride, scale,
    BLOCK_SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROUND: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Over positions first..last: largest score (base 2) and sum of weights [ROWS], weighted values [ROWS, V_PAD]."""
    k_dim = tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, 16], tl.float32)  # the sum of weights, 16 times over: the narrowest product there is
    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    for begin in range(first, last, TILE):
        at = begin + tl.arange(0, TILE)
        stored = at < context  # beyond it lies what others left behind
        block = tl.load(table + at // BLOCK_SIZE, mask=stored, other=0).to(tl.int64) * block_stride
        offset = at % BLOCK_SIZE
        k = tl.load(
            k_base + (block + offset * K_DIM)[None, :] + k_dim[:, None],
            mask=stored[None, :] & (k_dim < K_DIM)[:, None],
            other=0.0,
        )
        scores = _product(q, k, tl.zeros([ROWS, TILE], tl.float32), WIDE)
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, 1e-7 of the cap off around 0
            doubled = tl.exp2(scores * (scale * (2 * LOG2E / SOFTCAP)))
            scores = (1 - 2 / (1 + doubled)) * (SOFTCAP * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        seen = (at[None, :] <= position[:, None]) & stored[None, :]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        finite = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(m - finite)
        m = new_m
        if ROUND:
            weights = weights.to(v_base.dtype.element_ty)
        v = tl.load(
            v_base + (block + offset * V_DIM)[:, None] + v_dim[None, :],
            mask=stored[:, None] & (v_dim < V_DIM)[None, :],
            other=0.0,
        )
        acc = _product(weights, v, acc * kept[:, None], WIDE)
        sums = _product(weights, tl.full([TILE, 16], 1.0, tl.float32).to(weights.dtype), sums * kept[:, None], WIDE)
    return m, tl.max(sums, 1), acc


@triton.jit
def _product(a, b, acc, WIDE: tl.constexpr):
    """a @ b + acc in float32; WIDE widens the operands first (the interpreter computes nothing in bfloat16)."""
    if WIDE:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _merged(m_a, mass_a, acc_a, m_b, mass_b, acc_b):
    """Two spans of a context as one. Nothing merged with a span is that span, to the bit."""
    m = tl.maximum(m_a, m_b)
    finite = tl.where(m == float("-inf"), 0.0, m)
    a = tl.exp2(m_a - finite)
    b = tl.exp2(m_b - finite)
    return m, mass_a * a + mass_b * b, acc_a * a[:, None] + acc_b * b[:, None]


@triton.jit
def _sunk(m, mass, acc, sink):
    """One more logit in the softmax, whose share goes nowhere."""
    sink = sink * LOG2E
    new_m = tl.maximum(m, sink)
    kept = tl.exp2(m - new_m)
    return new_m, mass * kept + tl.exp2(sink - new_m), acc * kept[:, None]


@triton.jit
def _write(out, at, real, mass, acc, V_DIM: tl.constexpr, V_PAD: tl.constexpr):
    """Rows `at` of out [.., V_DIM]."""
    dim = tl.arange(0, V_PAD)
    rows = acc / tl.where(mass == 0, 1.0, mass)[:, None]  # 0 for a row that is none
    target = out + at[:, None] * V_DIM + dim[None, :]
    tl.store(target, rows.to(out.dtype.element_ty), mask=real[:, None] & (dim < V_DIM)[None, :])
