// Attention of a whole step: storing its K and V, dealing out the work.

#pragma once

#include <vector>

#include "paged.h"
#include "workers.h"

namespace {

// pool[block][head][offset] = row, for every real row and kv head of K or of V.
template <class Row, class Pool>
void store_rows(const Batch& batch, const void* rows, int64_t token_stride, int64_t head_stride, int num_heads, int dim,
                int64_t at) {
    for (int i = 0; i < batch.num_rows; i++) {
        Pool* block = static_cast<Pool*>(batch.pool) + batch.row_blocks[i] * batch.block_stride + at;
        for (int h = 0; h < num_heads; h++)
            convert(static_cast<const Row*>(rows) + i * token_stride + h * head_stride,
                    block + ((int64_t)h * batch.block_size + batch.row_offsets[i]) * dim, dim);
    }
}

// False: no memory for scratch.
template <class Row, class Pool>
bool attend_step(const Layer& layer, const Batch& batch, const Rows& rows, int threads) {
    store_rows<Row, Pool>(batch, rows.key, rows.key_token, rows.key_head, layer.num_kv_heads, layer.k_dim,
                          layer.k_offset);
    store_rows<Row, Pool>(batch, rows.value, rows.value_token, rows.value_head, layer.num_kv_heads, layer.v_dim,
                          layer.v_offset);
    const Paged<Row, Pool> paged(layer, batch, rows);
    thread_local std::vector<Item> items;
    items.clear();
    for (int s = 0; s < batch.num_seqs; s++)
        for (int t = batch.starts[s]; t < batch.starts[s + 1]; t += paged.most_tokens()) {
            int left = batch.starts[s + 1] - t;
            for (int h = 0; h < layer.num_kv_heads; h++)
                items.push_back({s, h, t, left < paged.most_tokens() ? left : paged.most_tokens()});
        }
    std::atomic<bool> enough_memory{true};
    const Item* item = items.data();
    const int count = (int)items.size();
    workers().each(count, threads, [&, item](int i) {
        if (!paged.attend(item[i], i + threads < count ? item + i + threads : nullptr)) enough_memory = false;
    });
    const int64_t row = (int64_t)layer.num_heads * layer.v_dim;
    memset(static_cast<Row*>(rows.out) + batch.num_rows * row, 0,
           (rows.num_tokens - batch.num_rows) * row * sizeof(Row));
    return enough_memory;
}


// Returns 0, or 1 when there was no memory for scratch.
int attend(const Layer& layer, const Batch& batch, const Rows& rows, int threads) {
    auto step = rows.is_bf16 ? (layer.pool_is_bf16 ? attend_step<bf16, bf16> : attend_step<bf16, float>)
                             : (layer.pool_is_bf16 ? attend_step<float, bf16> : attend_step<float, float>);
    try {
        return step(layer, batch, rows, threads) ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
