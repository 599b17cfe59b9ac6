// One engine step in one call: the operations of a model (program.h) over all rows of the step.
//
// Rows of a buffer lie one after the other. After kGather only the rows whose logits are wanted go on; a step that
// wants none ends there.

#include <chrono>

#include "attend.h"
#include "elementwise.h"

namespace {

class Running {
  public:
    Running(const Program& program, const Step& step)
        : program_(program), step_(step), rows_(step.batch.num_rows),
          on_shift_(workers().begin_shift(step.threads, step.loans)) {}
    ~Running() {
        if (on_shift_) workers().end_shift();
    }
    Running(const Running&) = delete;

    // False: no memory.
    bool run() {
        if (!reserve()) return false;
        for (int i = 0; i < program_.num_ops && rows_ > 0; i++) {
            const Op& op = program_.ops[i];
            threads_ = on_shift_ ? workers().threads() : step_.threads;
            if (!step_.spent_ns) {
                if (!execute(op)) return false;
                continue;
            }
            const auto start = std::chrono::steady_clock::now();
            if (!execute(op)) return false;
            step_.spent_ns[op.code] += (std::chrono::steady_clock::now() - start).count();
        }
        return true;
    }

  private:
    bool reserve() {
        thread_local Arena arena;
        size_t bytes = 0;
        for (int b = 0; b < program_.num_buffers; b++)
            if (b != program_.logits) bytes += Arena::bytes<float>((int64_t)rows_ * width(b));
        if (program_.num_buffers > kMostBuffers || !arena.reset(bytes)) return false;
        for (int b = 0; b < program_.num_buffers; b++)
            buffers_[b] = b == program_.logits ? step_.out : arena.take<float>((int64_t)rows_ * width(b));
        return true;
    }

    bool execute(const Op& op) {
        const float* src = buffers_[op.src];
        float* dst = buffers_[op.dst];
        const int from = width(op.src), to = width(op.dst);
        switch (op.code) {
            case kEmbed:
                for (int i = 0; i < rows_; i++) {
                    weight_row(program_.linears[op.index], (int)step_.ids[i], row(dst, i, to));
                    if (op.value != 1.0f) scale_row(row(dst, i, to), op.value, to);
                }
                return true;
            case kLinear:
                return linear(program_.linears[op.index], src, from, dst, to, rows_, op.add != 0, threads_);
            case kAttend: return attend_rows_of(op, src, dst);
            case kGather:
                gather(src_buffer(op.src), from);
                if (op.dst != op.src) gather(dst, to);
                rows_ = step_.num_logits;
                return true;
            default:
                each_rows(rows_, threads_, [&](int first, int last) {
                    for (int i = first; i < last; i++) execute_row(op, row(src, i, from), row(dst, i, to), i);
                });
                return true;
        }
    }

    void execute_row(const Op& op, const float* src, float* dst, int i) const {
        const int from = width(op.src), to = width(op.dst);
        switch (op.code) {
            case kNorm: return norm_row(src, program_.norms[op.index], from, op.value, dst);
            case kRotate: {
                const Rotation& rotation = program_.rotations[op.index];
                const int64_t at = (int64_t)i * (rotation.rotary_dim / 2);
                return rotate_row(rotation, dst, step_.cos[rotation.table] + at, step_.sin[rotation.table] + at);
            }
            case kGate:
                return op.index == kSilu ? gate_row<silu>(src, src + to, to, dst) : gate_row<gelu_tanh>(src, src + to, to, dst);
            case kAdd: return add_row(src, op.value, to, dst);
            case kSoftcap: return softcap_row(dst, op.value, to);
            case kScale: return scale_row(dst, op.value, to);
        }
    }

    bool attend_rows_of(const Op& op, const float* src, float* dst) const {
        const Layer& layer = program_.layers[op.index];
        const int64_t keys = (int64_t)layer.num_heads * layer.k_dim, values = keys + (int64_t)layer.num_kv_heads * layer.k_dim;
        const int64_t stride = width(op.src);
        const Rows rows = {src,    src + keys,  src + values, dst,          stride, layer.k_dim,
                           stride, layer.k_dim, stride,       layer.v_dim,  rows_,  0};
        return attend(layer, step_.batch, rows, threads_) == 0;
    }

    void gather(float* buffer, int width) const {  // rows ascend, so none is overwritten before it moved
        for (int i = 0; i < step_.num_logits; i++)
            if (step_.logit_rows[i] != i) memcpy(row(buffer, i, width), row(buffer, step_.logit_rows[i], width), width * sizeof(float));
    }

    int width(int buffer) const { return program_.widths[buffer]; }
    float* src_buffer(int buffer) const { return buffers_[buffer]; }
    template <class T>
    static T* row(T* buffer, int64_t i, int width) { return buffer + i * width; }

    static constexpr int kMostBuffers = 8;
    const Program& program_;
    const Step& step_;
    int rows_, threads_ = 1;
    const bool on_shift_;
    float* buffers_[kMostBuffers];
};

}  // namespace

// Returns 0, or 1 when there was no memory.
EXPORT int baton_step(const Program* program, const Step* step) {
    try {
        return Running(*program, *step).run() ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
