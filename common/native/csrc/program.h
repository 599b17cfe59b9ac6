// A model's forward pass as a list of operations on buffers of rows, and what one step hands to it.
//
// Mirrored in common/model/program.py. Every operation treats a row by itself in a fixed order, so a row's bits do
// not depend on the other rows of a step, on their number or on threads.

#pragma once

#include "abi.h"
#include "linear.h"
#include "loans.h"

// What an operation does to the rows of `dst` (and `src`); `index` and `value` by the names in brackets.
enum Code : int32_t {
    kEmbed,    // dst = row [ids] of a linear's weight (index), times (value)
    kNorm,     // dst = src / rms(src) * norm (index), epsilon (value)
    kLinear,   // dst = linear (index) of src; with `add` dst += it
    kRotate,   // in place: head norms and rotary embedding of the queries and keys in dst, rotation (index)
    kAttend,   // dst = attention of layer (index) over the queries, keys and values in src, which join the pool
    kGate,     // dst = activation (index) of the first half of src, times its second half
    kAdd,      // dst += src * (value)
    kGather,   // from here on: only rows whose logits are wanted, of src and dst
    kSoftcap,  // in place: value * tanh(dst / value)
    kScale,    // in place: dst *= (value)
    kNumCodes,
};

enum Activation : int32_t { kSilu, kGeluTanh };

struct Op {
    int32_t code, src, dst, index;
    float value;
    int32_t add;
};

// Queries [num_heads, dim], then keys [num_kv_heads, dim] at the start of a row. Pairs are (i, i + rotary_dim / 2).
struct Rotation {
    int32_t num_heads, num_kv_heads, dim;
    int32_t rotary_dim;  // 0: none
    int32_t table;       // of Step.cos and Step.sin
    float epsilon;
    const float *query_norm, *key_norm;  // [dim] or null: RMS norm of every head before it is rotated
};

struct Program {
    const Op* ops;
    const Linear* linears;
    const Layer* layers;
    const float* const* norms;  // [width of the operation's src]
    const Rotation* rotations;
    const int32_t* widths;  // floats a row, by buffer
    int32_t num_ops, num_buffers, logits;  // `logits`: the buffer that is the step's result
};

struct Step {
    Batch batch;
    const int64_t* ids;         // [num_rows]
    const float* const* cos;    // by table: [num_rows, rotary_dim / 2]
    const float* const* sin;
    const int64_t* logit_rows;  // [num_logits], ascending
    float* out;                 // [num_logits, width of the logits]
    int64_t* spent_ns;          // [kNumCodes], added to; or null
    Loans* loans;               // what may be borrowed beside `threads`; or null
    int32_t num_logits, threads;
};
