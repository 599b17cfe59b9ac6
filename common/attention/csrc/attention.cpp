// Paged attention over a block-major pool, in place: store this step's K and V, then attend over the block table.
//
// One item of work is (sequence, kv head, a run of query tokens): all heads of the group share each tile of keys.
// Items are independent, so threads split them freely. tile.h fixes the arithmetic of a row.
//
// C ABI: plain structs and pointers, mirrored in native.py. Offsets and strides count elements.

#include <cstdlib>
#include <new>
#include <vector>

#include "tile.h"
#include "workers.h"

extern "C" {

struct BatonLayer {
    int64_t k_offset, v_offset;  // from the start of a block
    const float* sinks;          // [num_heads] or null
    int32_t num_heads, num_kv_heads, k_dim, v_dim;
    int32_t window;  // positions a token sees, itself included; 0: all
    int32_t pool_is_bf16;
    float scale, softcap;
};

struct BatonBatch {
    void* pool;
    int64_t block_stride;         // elements of the pool
    const int32_t* starts;        // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* block_tables;  // [num_seqs, table_stride]
    const int64_t* row_blocks;    // [num_rows]
    const int64_t* row_offsets;   // [num_rows]
    int64_t table_stride;
    int32_t num_seqs, num_rows, block_size;
};

// The rows of one step: [num_tokens, heads, dim], the last dimension contiguous, all of one type.
struct BatonRows {
    const void *query, *key, *value;
    void* out;  // contiguous
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int32_t num_tokens, is_bf16;
};
}

namespace {

constexpr int64_t kScratchBytes = 128 << 10;  // of query and output rows an item holds: well inside an L2 cache
constexpr int kAhead = 128;                   // bytes one prefetch hint covers

struct Item {
    int seq, head, first_token, num_tokens;  // tokens count from the start of the step
};

// Grows only; one per thread. Aligned to a cache line.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    char* reserve(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = static_cast<char*>(aligned_alloc(64, size));
            if (!memory) throw std::bad_alloc();
        }
        return memory;
    }
};

int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

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

// pool[block][head][offset] = row, for every real row and kv head of K or V.
template <class Row, class Pool>
void store_rows(const BatonBatch& batch, const Row* rows, int64_t token_stride, int64_t head_stride, int num_heads,
                int dim, int64_t at) {
    for (int i = 0; i < batch.num_rows; i++) {
        Pool* block = static_cast<Pool*>(batch.pool) + batch.row_blocks[i] * batch.block_stride + at;
        for (int h = 0; h < num_heads; h++)
            convert(rows + i * token_stride + h * head_stride,
                    block + ((int64_t)h * batch.block_size + batch.row_offsets[i]) * dim, dim);
    }
}

template <class Row, class Pool>
class Attention {
  public:
    Attention(const BatonLayer& layer, const BatonBatch& batch, const BatonRows& rows)
        : layer_(layer), batch_(batch), rows_(rows), group_(layer.num_heads / layer.num_kv_heads),
          width_(round_up(layer.v_dim, kWidth)) {}

    // All (sequence, head) pairs, long runs of tokens cut so that an item's rows fit its scratch.
    void plan(std::vector<Item>& items) const {
        int64_t token_bytes = (int64_t)group_ * (layer_.k_dim + width_) * sizeof(float);
        int most = kScratchBytes / token_bytes > 1 ? kScratchBytes / token_bytes : 1;
        items.clear();
        for (int s = 0; s < batch_.num_seqs; s++)
            for (int t = batch_.starts[s]; t < batch_.starts[s + 1]; t += most)
                for (int h = 0; h < layer_.num_kv_heads; h++)
                    items.push_back({s, h, t, batch_.starts[s + 1] - t < most ? batch_.starts[s + 1] - t : most});
    }

    void run(const Item& item) const {
        const int num_rows = item.num_tokens * group_;
        const int num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;  // of rows, as even as can be
        const int64_t query_floats = round_up(num_rows * layer_.k_dim, kLanes);
        const int64_t out_floats = (int64_t)num_rows * width_;
        const int64_t key_floats = (int64_t)layer_.k_dim * kTile;
        const bool copy_values = sizeof(Pool) != sizeof(float) || width_ != layer_.v_dim;
        const int64_t value_floats = copy_values ? (int64_t)kTile * width_ : 0;
        thread_local Scratch scratch;
        float* query = reinterpret_cast<float*>(
            scratch.reserve((query_floats + round_up(out_floats, kLanes) + key_floats + value_floats) * sizeof(float) +
                            num_rows * (sizeof(RowState) + sizeof(Visible))));
        float* keys = query + query_floats;
        float* values = keys + key_floats;
        float* out = values + value_floats;
        RowState* states = reinterpret_cast<RowState*>(out + round_up(out_floats, kLanes));
        Visible* see = reinterpret_cast<Visible*>(states + num_rows);

        memset(out, 0, out_floats * sizeof(float));
        if (value_floats) memset(values, 0, value_floats * sizeof(float));
        for (int b = 0; b < num_blocks; b++) {
            int first = first_row(b, num_blocks, num_rows), last = first_row(b + 1, num_blocks, num_rows);
            pack_queries(item, first, last, query + first * layer_.k_dim);
        }
        for (int i = 0; i < num_rows; i++) start(item, i, states + i);

        // Position of the item's first token, and the keys that any of its rows sees.
        const int position = batch_.context_lens[item.seq] - (batch_.starts[item.seq + 1] - item.first_token);
        const int begin = first_visible(position), end = position + item.num_tokens;
        Tile tile;
        for (int base = begin / kTile * kTile; base < end; base += kTile) {
            Visible span = {begin > base ? begin - base : 0, end - base < kTile ? end - base : kTile};
            find_rows(item, base, span, &tile);
            transpose_keys(tile.keys, span.first / kLanes * kLanes, round_up(span.last, kLanes), layer_.k_dim, keys,
                           [&](int, int) {});
            const float* const* value_rows = reinterpret_cast<const float* const*>(tile.values);
            const float* copied[kTile];
            if (copy_values) {
                for (int j = span.first; j < span.last; j++) {
                    convert(tile.values[j], values + j * width_, layer_.v_dim);
                    copied[j] = values + j * width_;
                }
                value_rows = copied;
            }
            for (int i = 0; i < num_rows; i++) {
                int at = position + i / group_;
                int lowest = first_visible(at) - base;
                see[i] = {lowest > 0 ? lowest : 0, at + 1 - base < kTile ? at + 1 - base : kTile};
            }
            for (int b = 0; b < num_blocks; b++) {
                int first = first_row(b, num_blocks, num_rows), last = first_row(b + 1, num_blocks, num_rows);
                attend_block(last - first, query + first * layer_.k_dim, keys, value_rows, see + first,
                             states + first, out + (int64_t)first * width_);
            }
        }
        for (int i = 0; i < num_rows; i++) finish(item, i, states[i], out + (int64_t)i * width_);
    }

  private:
    struct Tile {
        const Pool* keys[kTile];
        const Pool* values[kTile];
    };

    static int first_row(int block, int num_blocks, int num_rows) {
        return (int)((int64_t)block * num_rows / num_blocks);
    }
    int first_visible(int position) const {
        return layer_.window > 0 && position + 1 > layer_.window ? position + 1 - layer_.window : 0;
    }

    // Rows first .. last of the item, scaled, as float [k_dim][last - first].
    void pack_queries(const Item& item, int first, int last, float* to) const {
        const float scale = layer_.softcap > 0 ? layer_.scale / layer_.softcap : layer_.scale * kLog2e;
        for (int i = first; i < last; i++) {
            const Row* from = static_cast<const Row*>(rows_.query) +
                              (item.first_token + i / group_) * rows_.query_token +
                              (item.head * group_ + i % group_) * rows_.query_head;
            for (int d = 0; d < layer_.k_dim; d++) to[d * (last - first) + i - first] = to_float(from[d]) * scale;
        }
    }

    // A sink is a key that gives weight and no value.
    void start(const Item& item, int row, RowState* state) const {
        memset(state->sums, 0, sizeof state->sums);
        state->maximum = kLowest;
        if (!layer_.sinks) return;
        state->maximum = layer_.sinks[item.head * group_ + row % group_] * kLog2e;
        if (state->maximum < kLowest) state->maximum = kLowest;
        else state->sums[0] = 1;
    }

    // Where the keys and values of one tile lie. Columns outside `span` repeat its ends: nobody's blocks are read
    // there.
    void find_rows(const Item& item, int base, Visible span, Tile* tile) const {
        const int32_t* table = batch_.block_tables + item.seq * batch_.table_stride;
        const int size = batch_.block_size;
        int block = (base + span.first) / size, offset = (base + span.first) % size;
        for (int j = span.first; j < span.last; block++, offset = 0) {
            const Pool* start = static_cast<const Pool*>(batch_.pool) + table[block] * batch_.block_stride;
            const int64_t head = (int64_t)item.head * size;
            const Pool* key = start + layer_.k_offset + (head + offset) * layer_.k_dim;
            const Pool* value = start + layer_.v_offset + (head + offset) * layer_.v_dim;
            for (; offset < size && j < span.last; offset++, j++, key += layer_.k_dim, value += layer_.v_dim) {
                tile->keys[j] = key;
                tile->values[j] = value;
            }
        }
        for (int j = 0; j < span.first; j++) tile->keys[j] = tile->keys[span.first];
        for (int j = span.last; j < kTile; j++) tile->keys[j] = tile->keys[span.last - 1];
    }

    void attend_block(int num_rows, const float* query, const float* keys, const float* const* values,
                      const Visible* see, RowState* states, float* out) const {
        using Attend = void (*)(const float*, const float*, const float* const*, int, int, float, const Visible*,
                                RowState*, float*);
        static constexpr Attend kAttend[kMaxRows] = {attend_rows<1, float>, attend_rows<2, float>,
                                                     attend_rows<3, float>, attend_rows<4, float>,
                                                     attend_rows<5, float>, attend_rows<6, float>};
        kAttend[num_rows - 1](query, keys, values, layer_.k_dim, width_, layer_.softcap, see, states, out);
    }

    // Divide by the denominator: partial sums are folded in halves, in a fixed order.
    void finish(const Item& item, int row, RowState state, const float* out) const {
        for (int half = kLanes / 2; half > 0; half /= 2)
            for (int i = 0; i < half; i++) state.sums[i] += state.sums[i + half];
        Row* to = static_cast<Row*>(rows_.out) +
                  ((int64_t)(item.first_token + row / group_) * layer_.num_heads + item.head * group_ + row % group_) *
                      layer_.v_dim;
        int d = 0;
        for (; d + kWidth <= layer_.v_dim; d += kWidth) store(to + d, load(out + d) / splat(state.sums[0]));
        for (; d < layer_.v_dim; d++) store_one(to + d, out[d] / state.sums[0]);
    }

    const BatonLayer& layer_;
    const BatonBatch& batch_;
    const BatonRows& rows_;
    const int group_;  // query heads per kv head
    const int width_;  // floats of an output row in scratch
};

Workers& workers() {
    static Workers* forever = new Workers;  // its threads outlive static destructors
    return *forever;
}

template <class Row, class Pool>
void attend(const BatonLayer& layer, const BatonBatch& batch, const BatonRows& rows, int threads) {
    store_rows<Row, Pool>(batch, static_cast<const Row*>(rows.key), rows.key_token, rows.key_head,
                          layer.num_kv_heads, layer.k_dim, layer.k_offset);
    store_rows<Row, Pool>(batch, static_cast<const Row*>(rows.value), rows.value_token, rows.value_head,
                          layer.num_kv_heads, layer.v_dim, layer.v_offset);
    Attention<Row, Pool> attention(layer, batch, rows);
    thread_local std::vector<Item> items;
    attention.plan(items);
    const Item* item = items.data();
    workers().each((int)items.size(), threads, [&](int i) { attention.run(item[i]); });
    const int64_t row = (int64_t)layer.num_heads * layer.v_dim;
    memset(static_cast<Row*>(rows.out) + batch.num_rows * row, 0,
           (rows.num_tokens - batch.num_rows) * row * sizeof(Row));
}

}  // namespace

extern "C" {

// Returns 0, or 1 when memory for scratch could not be had.
__attribute__((visibility("default"))) int baton_attend(const BatonLayer* layer, const BatonBatch* batch,
                                                        const BatonRows* rows, int threads) {
    try {
        if (rows->is_bf16 && layer->pool_is_bf16) attend<bf16, bf16>(*layer, *batch, *rows, threads);
        else if (rows->is_bf16) attend<bf16, float>(*layer, *batch, *rows, threads);
        else if (layer->pool_is_bf16) attend<float, bf16>(*layer, *batch, *rows, threads);
        else attend<float, float>(*layer, *batch, *rows, threads);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// The kernel's own elementary functions, for tests of their accuracy. In place.
__attribute__((visibility("default"))) void baton_exp2(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = exp2_nonpositive(splat(x[i]))[0];
}
__attribute__((visibility("default"))) void baton_tanh(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = tanh(splat(x[i]))[0];
}
__attribute__((visibility("default"))) int baton_vector_width(void) { return kWidth; }
}
