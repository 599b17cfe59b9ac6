// The C interface: plain structs and pointers, mirrored in native.py. Offsets and strides count elements.

#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

// One layer's share of every block: K is [num_kv_heads, block_size, k_dim] at k_offset, V likewise.
struct Layer {
    int64_t k_offset, v_offset;
    const float* sinks;  // [num_heads] or null
    int32_t num_heads, num_kv_heads, k_dim, v_dim;
    int32_t window;  // positions a token sees, itself included; 0: all
    int32_t pool_is_bf16;
    float scale, softcap;  // softcap 0: none
};

struct Batch {
    void* pool;
    int64_t block_stride;
    const int32_t* starts;        // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* block_tables;  // [num_seqs, table_stride]
    const int64_t* row_blocks;    // [num_rows]
    const int64_t* row_offsets;   // [num_rows]
    int64_t table_stride;
    int32_t num_seqs, num_rows, block_size;
};

// The rows of one step, [num_tokens, heads, dim] with the last dimension contiguous, all of one type.
struct Rows {
    const void *query, *key, *value;
    void* out;  // contiguous
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int32_t num_tokens, is_bf16;
};
