"""Random sequences whose blocks lie scattered in a pool, and attention written out plainly for them."""

from dataclasses import dataclass

import torch

from common.attention.base import AttentionBackend, AttentionBatch, LayerSpec


@dataclass
class Sequence:
    """Everything a sequence ever sees: rows [0, len) of query, key and value, and the blocks it owns."""

    query: torch.Tensor  # [length, num_heads, k_head_dim]
    key: torch.Tensor  # [length, num_kv_heads, k_head_dim]
    value: torch.Tensor  # [length, num_kv_heads, v_head_dim]
    blocks: list[int]


@dataclass
class Scene:
    layer: LayerSpec
    block_size: int
    pool: torch.Tensor  # [num_blocks, block_elements]; NaN wherever nothing was stored
    sequences: list[Sequence]

    def empty_pool(self) -> None:
        self.pool.fill_(float("nan"))

    def step(
        self, backend: AttentionBackend, parts: list[tuple[int, int, int]], *, padding_rows: int = 0
    ) -> list[torch.Tensor]:
        """One forward pass over (sequence, first row, last row) parts; the output rows of each, then the padding's."""
        query = torch.cat([self.sequences[s].query[a:b] for s, a, b in parts])
        key = torch.cat([self.sequences[s].key[a:b] for s, a, b in parts])
        value = torch.cat([self.sequences[s].value[a:b] for s, a, b in parts])
        if padding_rows:
            query, key, value = (
                torch.cat([x, x.new_full((padding_rows, *x.shape[1:]), float("nan"))]) for x in (query, key, value)
            )
        out = backend.attend(self.layer, query, key, value, self.batch(parts))
        assert out.shape == (query.shape[0], self.layer.num_heads, self.layer.v_head_dim)
        assert out.dtype == query.dtype
        return list(out.split([b - a for _, a, b in parts] + ([padding_rows] if padding_rows else [])))

    def batch(self, parts: list[tuple[int, int, int]]) -> AttentionBatch:
        size = self.block_size
        starts, width = [0], max(len(self.sequences[s].blocks) for s, _, _ in parts)
        tables = torch.full((len(parts), width), -(10**9), dtype=torch.int32)  # an entry nobody may follow
        rows: list[tuple[int, int]] = []
        for i, (s, a, b) in enumerate(parts):
            starts.append(starts[-1] + b - a)
            used = -(-b // size)
            tables[i, :used] = torch.tensor(self.sequences[s].blocks[:used])
            rows += [(self.sequences[s].blocks[p // size], p % size) for p in range(a, b)]
        return AttentionBatch(
            pool=self.pool,
            block_size=size,
            starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([b for _, _, b in parts], dtype=torch.int32),
            block_tables=tables,
            row_blocks=torch.tensor([block for block, _ in rows], dtype=torch.int64),
            row_offsets=torch.tensor([offset for _, offset in rows], dtype=torch.int64),
        )


def draw(
    *,
    seed: int = 0,
    lengths: list[int],
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (64, 64),
    block_size: int = 16,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    magnitude: float = 1.0,
) -> Scene:
    """Sequences of these lengths, in a pool that also holds other layers (gaps before, between and after)."""
    random = torch.Generator().manual_seed(seed)
    kv_elements = [heads[1] * block_size * dim for dim in dims]
    layer = LayerSpec(
        index=3,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        k_head_dim=dims[0],
        v_head_dim=dims[1],
        k_offset=5,
        v_offset=5 + kv_elements[0] + 3,
        scale=dims[0] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=torch.randn(heads[0], generator=random) if sinks else None,
    )
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 3, generator=random).tolist()
    pool = torch.empty(len(order), 5 + sum(kv_elements) + 3 + 7, dtype=kv_dtype or dtype)
    sequences = []
    for length, count in zip(lengths, counts, strict=True):
        blocks, order = order[:count], order[count:]
        shapes = ((length, heads[0], dims[0]), (length, heads[1], dims[0]), (length, heads[1], dims[1]))
        query, key, value = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
        sequences.append(Sequence(query * magnitude, key, value, blocks))
    scene = Scene(layer, block_size, pool, sequences)
    scene.empty_pool()
    return scene


def plain_attention(scene: Scene, sequence: Sequence) -> torch.Tensor:
    """softmax(q k) v of every row in float64, on what the pool's type leaves of K and V."""
    layer, length = scene.layer, sequence.key.shape[0]
    query, key, value = (
        x.to(scene.pool.dtype if kv else x.dtype).double().transpose(0, 1)
        for x, kv in ((sequence.query, False), (sequence.key, True), (sequence.value, True))
    )
    group = layer.num_heads // layer.num_kv_heads
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * layer.scale
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    age = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    hidden = (age < 0) | (age >= (layer.window or length))
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sink = layer.sinks.double()[:, None, None].expand(-1, length, 1)
        scores = torch.cat([scores, sink], 2)
    weights = scores.softmax(2)[:, :, :length]
    return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)
