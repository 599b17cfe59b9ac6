// Attention of one item: a run of query tokens of one sequence, all heads that share one kv head.
//
// The item's rows (token, head) are packed once; then every tile of keys is found through the block table,
// transposed once and used by all rows, at most kMaxRows at a time.

#pragma once

#include "abi.h"
#include "arena.h"
#include "tile.h"

namespace {

constexpr int64_t kScratchBytes = 128 << 10;  // of query and output rows an item holds: well inside an L2 cache

struct Item {
    int seq, head, first_token, num_tokens;  // tokens count from the start of the step
};

template <class To, class From>
void convert(const From* from, To* to, int count) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, load(from + i));
    for (; i < count; i++) store_one(to + i, to_float(from[i]));
}
template <class T>
void convert(const T* from, T* to, int count) {
    memcpy(to, from, count * sizeof(T));
}

template <class Row, class Pool>
class Paged {
  public:
    Paged(const Layer& layer, const Batch& batch, const Rows& rows)
        : layer_(layer), batch_(batch), rows_(rows), group_(layer.num_heads / layer.num_kv_heads),
          width_(round_up(layer.v_dim, kWidth)) {
        int64_t token_bytes = (int64_t)group_ * (layer.k_dim + width_) * sizeof(float);
        most_tokens_ = kScratchBytes > token_bytes ? (int)(kScratchBytes / token_bytes) : 1;
    }

    // Tokens that an item may have.
    int most_tokens() const { return most_tokens_; }

    // Writes the item's rows of `out`. `following` is what this thread may do next: its first keys are fetched
    // while the last of this item's are at work. False: no memory.
    bool attend(const Item& item, const Item* following) const {
        thread_local Arena arena;
        Work work;
        if (!prepare(item, arena, &work)) return false;
        Tile tiles[2], *tile = tiles, *next = tiles + 1;
        find(item, first_base(item), tile);
        for (;;) {
            const bool last = tile->base + kTile >= end(item);
            Ahead ahead = {};
            if (!last) find(item, tile->base + kTile, next);
            else if (following) find(*following, first_base(*following), next);
            if (!last || following) list(*next, &ahead);
            attend_tile(item, *tile, work, &ahead);
            if (last) break;
            Tile* used = tile;
            tile = next;
            next = used;
        }
        for (int i = 0; i < work.num_rows; i++) finish(item, i, work);
        return true;
    }

  private:
    // Where the keys and values of one tile lie, and the part of it that some row sees.
    struct Tile {
        int base;  // position of its first key
        Visible span;
        const Pool* keys[kTile];
        const Pool* values[kTile];
    };

    // An item's state. Rows come in blocks for one microkernel each, as even as can be.
    struct Work {
        int num_rows, num_blocks;
        float* query;   // by block [k_dim][rows of the block], scaled
        float* keys;    // [k_dim][kTile]
        float* values;  // [kTile][width], or null: values are read where they lie
        float* out;     // [num_rows][width], before the division
        RowState* states;
        Visible* see;  // in the present tile

        int first_row(int block) const { return (int)((int64_t)block * num_rows / num_blocks); }
    };

    bool prepare(const Item& item, Arena& arena, Work* work) const {
        const int rows = item.num_tokens * group_;
        work->num_rows = rows;
        work->num_blocks = (rows + kMaxRows - 1) / kMaxRows;
        // Copied if they end within a vector, or if block after block would convert them again.
        const bool copy = width_ != layer_.v_dim || (sizeof(Pool) != sizeof(float) && work->num_blocks > 1);
        const int64_t query = (int64_t)rows * layer_.k_dim, out = (int64_t)rows * width_;
        const int64_t keys = (int64_t)layer_.k_dim * kTile, values = copy ? (int64_t)width_ * kTile : 0;
        if (!arena.reset(Arena::bytes<float>(query) + Arena::bytes<float>(out) + Arena::bytes<float>(keys) +
                         Arena::bytes<float>(values) + Arena::bytes<RowState>(rows) + Arena::bytes<Visible>(rows)))
            return false;
        work->query = arena.take<float>(query);
        work->keys = arena.take<float>(keys);
        work->values = copy ? arena.take<float>(values) : nullptr;
        work->out = arena.take<float>(out);
        work->states = arena.take<RowState>(rows);
        work->see = arena.take<Visible>(rows);
        memset(work->out, 0, out * sizeof(float));
        if (copy) memset(work->values, 0, values * sizeof(float));
        for (int b = 0; b < work->num_blocks; b++) pack(item, work->first_row(b), work->first_row(b + 1), work->query);
        for (int i = 0; i < rows; i++) start(item, i, work->states + i);
        return true;
    }

    // Rows first .. last of the item as one block. Scores come out in powers of two, or divided by the softcap.
    void pack(const Item& item, int first, int last, float* query) const {
        const float scale = layer_.softcap > 0 ? layer_.scale / layer_.softcap : layer_.scale * kLog2e;
        float* to = query + (int64_t)first * layer_.k_dim;
        for (int i = first; i < last; i++) {
            const Row* from = static_cast<const Row*>(rows_.query) +
                              (item.first_token + i / group_) * rows_.query_token + head(item, i) * rows_.query_head;
            for (int d = 0; d < layer_.k_dim; d++) to[d * (last - first) + i - first] = to_float(from[d]) * scale;
        }
    }

    // A sink is a key that takes weight and gives no value.
    void start(const Item& item, int row, RowState* state) const {
        *state = {kLowest, {}};
        if (!layer_.sinks || !(layer_.sinks[head(item, row)] * kLog2e > kLowest)) return;
        state->maximum = layer_.sinks[head(item, row)] * kLog2e;
        state->sums[0] = 1;
    }

    void find(const Item& item, int base, Tile* tile) const {
        const int first = first_visible(position(item)) - base, last = end(item) - base, size = batch_.block_size;
        tile->base = base;
        tile->span = {first > 0 ? first : 0, last < kTile ? last : kTile};
        const Visible span = tile->span;
        const int32_t* table = batch_.block_tables + item.seq * batch_.table_stride;
        int block = (base + span.first) / size, offset = (base + span.first) % size;
        for (int j = span.first; j < span.last; block++, offset = 0) {
            const Pool* start = static_cast<const Pool*>(batch_.pool) + table[block] * batch_.block_stride;
            const int64_t row = (int64_t)item.head * size + offset;
            const Pool* key = start + layer_.k_offset + row * layer_.k_dim;
            const Pool* value = start + layer_.v_offset + row * layer_.v_dim;
            for (; offset < size && j < span.last; offset++, j++, key += layer_.k_dim, value += layer_.v_dim) {
                tile->keys[j] = key;
                tile->values[j] = value;
            }
        }
        // The transposition works in whole vectors: beyond its ends the span is repeated, nothing else is read.
        for (int j = 0; j < span.first; j++) tile->keys[j] = tile->keys[span.first];
        for (int j = span.last; j < kTile; j++) tile->keys[j] = tile->keys[span.last - 1];
    }

    void list(const Tile& tile, Ahead* ahead) const {
        ahead->lines = sizeof(Pool);
        ahead->row_bytes = (layer_.k_dim < layer_.v_dim ? layer_.v_dim : layer_.k_dim) * sizeof(Pool);
        for (int j = tile.span.first; j < tile.span.last; j++)
            ahead->rows[ahead->count++] = reinterpret_cast<const char*>(tile.keys[j]);
        for (int j = tile.span.first; j < tile.span.last; j++)
            ahead->rows[ahead->count++] = reinterpret_cast<const char*>(tile.values[j]);
    }

    void attend_tile(const Item& item, const Tile& tile, const Work& work, Ahead* ahead) const {
        transpose_keys(tile.keys, tile.span.first / kLanes * kLanes, round_up(tile.span.last, kLanes), layer_.k_dim,
                       work.keys, ahead);
        const float* copies[kTile];
        if (work.values)
            for (int j = tile.span.first; j < tile.span.last; j++) {
                convert(tile.values[j], work.values + j * width_, layer_.v_dim);
                copies[j] = work.values + j * width_;
            }
        for (int i = 0; i < work.num_rows; i++) {
            const int at = position(item) + i / group_, first = first_visible(at) - tile.base, last = at + 1 - tile.base;
            work.see[i] = {first > 0 ? first : 0, last < kTile ? last : kTile};
        }
        for (int b = 0; b < work.num_blocks; b++)
            if (work.values) attend_block(b, copies, work, ahead);
            else attend_block(b, tile.values, work, ahead);
    }

    template <class T>
    void attend_block(int block, const T* const* values, const Work& work, Ahead* ahead) const {
        using Attend = decltype(&attend_rows<1, T>);
        static constexpr Attend kAttend[kMaxRows] = {attend_rows<1, T>, attend_rows<2, T>, attend_rows<3, T>,
                                                     attend_rows<4, T>, attend_rows<5, T>, attend_rows<6, T>};
        const int64_t first = work.first_row(block);
        kAttend[work.first_row(block + 1) - first - 1](work.query + first * layer_.k_dim, work.keys, values,
                                                       layer_.k_dim, width_, layer_.softcap, work.see + first,
                                                       work.states + first, work.out + first * width_, ahead);
    }

    // Divide by the denominator, whose partial sums are folded in halves.
    void finish(const Item& item, int row, const Work& work) const {
        float* sums = work.states[row].sums;
        for (int half = kLanes / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) sums[i] += sums[i + half];
        const float* from = work.out + (int64_t)row * width_;
        const int64_t token = item.first_token + row / group_;
        Row* to = static_cast<Row*>(rows_.out) + (token * layer_.num_heads + head(item, row)) * layer_.v_dim;
        int d = 0;
        for (; d + kWidth <= layer_.v_dim; d += kWidth) store(to + d, load(from + d) / splat(sums[0]));
        for (; d < layer_.v_dim; d++) store_one(to + d, from[d] / sums[0]);
    }

    int head(const Item& item, int row) const { return item.head * group_ + row % group_; }
    int position(const Item& item) const {  // of its first token
        return batch_.context_lens[item.seq] - (batch_.starts[item.seq + 1] - item.first_token);
    }
    int end(const Item& item) const { return position(item) + item.num_tokens; }
    int first_visible(int position) const {
        return layer_.window > 0 && position >= layer_.window ? position + 1 - layer_.window : 0;
    }
    int first_base(const Item& item) const { return first_visible(position(item)) / kTile * kTile; }

    const Layer& layer_;
    const Batch& batch_;
    const Rows& rows_;
    const int group_;  // query heads per kv head
    const int width_;  // floats of an output row in scratch
    int most_tokens_;
};

}  // namespace
