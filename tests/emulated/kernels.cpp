// Everything the native kernels compute, on inputs from an integer generator, one line each: a name, a hash of the
// result's bits (every NaN counts as one value), and its first bits. What one machine prints another must print.
//
// README.md beside this file says how to run it for CPUs that are not at hand.

#include <cinttypes>
#include <cstdio>
#include <string>
#include <vector>

#include "../../common/native/csrc/step.cpp"

namespace {

typedef std::vector<float> Floats;

// Numerical Recipes' generator, its upper bits.
class Random {
  public:
    explicit Random(uint32_t seed) : state_(seed * 2654435761u + 12345) {}
    uint32_t next() {
        state_ = state_ * 1664525u + 1013904223u;
        return state_ >> 8;
    }
    int below(int limit) { return (int)(next() % (uint32_t)limit); }
    // The sum of four, so that some are small; every step exact.
    float number() {
        int32_t sum = 0;
        for (int i = 0; i < 4; i++) sum += (int32_t)next() - (1 << 23);
        return (float)(sum >> 3) * 0x1p-21f;
    }
    Floats floats(int64_t count, float scale = 1.0f) {
        Floats x(count);
        for (float& value : x) value = number() * scale;
        return x;
    }
    // Normal and, now and then, subnormal fp16.
    uint16_t half() {
        const int exponent = below(16) ? 4 + below(8) : 0;
        return (uint16_t)((next() & 0x83ff) | exponent << 10);
    }

  private:
    uint32_t state_;
};

class Hash {
  public:
    void add(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (x != x) bits = 0x7fc00000;
        if (count_++ < 3) first_[count_ - 1] = bits;
        for (int i = 0; i < 4; i++) state_ = (state_ ^ (bits >> (8 * i) & 0xff)) * 0x100000001b3u;
    }
    void print(const std::string& name) const {
        printf("%-58s %016" PRIx64 " %08x %08x %08x\n", name.c_str(), state_, first_[0], first_[1], first_[2]);
    }

  private:
    uint64_t state_ = 0xcbf29ce484222325u;  // FNV-1a
    uint32_t first_[3] = {};
    int64_t count_ = 0;
};

template <class T>
void report(const std::string& name, const T* x, int64_t count) {
    Hash hash;
    for (int64_t i = 0; i < count; i++) hash.add(to_float(x[i]));
    hash.print(name);
}
void report(const std::string& name, const Floats& x) { report(name, x.data(), (int64_t)x.size()); }

std::vector<bf16> narrow(const Floats& x) {
    std::vector<bf16> y(x.size());
    for (size_t i = 0; i < x.size(); i++) store_one(&y[i], x[i]);
    return y;
}

// A layer and its memory, 64-byte aligned as Python's is.
struct Weights {
    Arena arena;
    Floats bias;
    Linear layer;

    Weights(Kind kind, int n, int k, bool with_bias, Random& random) {
        const int64_t tiles = (n + kOutputs - 1) / kOutputs, count = tiles * kOutputs * k;
        const int64_t factors = count / kGroup;
        if (with_bias) bias = random.floats(n);
        arena.reset(count * sizeof(float) + 2 * Arena::bytes<uint16_t>(factors) + 4096);
        uint16_t* halves = arena.take<uint16_t>(2 * factors);
        for (int64_t i = 0; i < 2 * factors; i++) halves[i] = random.half();
        layer = {kind, n, k, nullptr, halves, halves + factors, with_bias ? bias.data() : nullptr};
        layer.data = kind == F32 ? numbers<float>(count, random) : kind == BF16 ? numbers<bf16>(count, random)
                     : bytes(kind == Q8 ? count : count / 2, random);
    }

  private:
    template <class T>
    const void* numbers(int64_t count, Random& random) {
        T* data = arena.take<T>(count);
        for (int64_t i = 0; i < count; i++) store_one(data + i, random.number());
        return data;
    }
    // The first outputs all ones: sums that need every bit they have.
    const void* bytes(int64_t count, Random& random) {
        uint8_t* data = arena.take<uint8_t>(count);
        for (int64_t i = 0; i < count; i++) data[i] = i % (4 * kOutputs) < 8 ? 0xff : (uint8_t)random.next();
        return data;
    }
};

const char* const kKinds[] = {"f32", "bf16", "q8", "q4"};

// Rows that are hard to quantise, among ordinary ones.
Floats awkward_rows(int rows, int k, Random& random) {
    Floats x = random.floats((int64_t)rows * k);
    const auto row = [&](int r) { return x.data() + (int64_t)(r % rows) * k; };
    if (rows < 5) return x;
    for (int i = 0; i < k; i++) {
        row(0)[i] = i % 64 < 32 ? 127.0f : -127.0f;  // the largest sums there are
        row(1)[i] *= 0x1p-140f;                      // subnormal, and so are its scales
        row(2)[i] = (float)(i % 255 - 127) * 0.5f;   // ties
        row(3)[i] = i % 64 < 32 ? 0.0f : i % 2 ? 127.0f : -127.0f;
        row(4)[i] *= i % 7 ? 1.0f : 100.0f;
    }
    if (rows > 12) row(9)[3] = INFINITY, row(11)[k - 1] = NAN, row(12)[0] = 1e30f;
    return x;
}

void check_linear() {
    const int shapes[][2] = {{16, 32}, {17, 96}, {100, 576}, {33, 1536}};
    for (int kind = F32; kind <= Q4; kind++)
        for (auto [n, k] : shapes) {
            Random random(kind * 100 + n);
            const Weights weights((Kind)kind, n, k, n != 16, random);
            const std::string of = std::string(kKinds[kind]) + " " + std::to_string(n) + "x" + std::to_string(k);
            for (int rows : {1, 2, 5, 6, 7, 8, 9, 12, 13, 33, 70, 150}) {
                if ((int64_t)rows * n * k > 4000000) continue;
                const Floats x = awkward_rows(rows, k, random);
                const bool add = rows % 2;
                Floats y = random.floats((int64_t)rows * n);
                linear(weights.layer, x.data(), k, y.data(), n, rows, add, rows == 13 ? 3 : 1);
                report("linear " + of + " rows " + std::to_string(rows) + (add ? " add" : ""), y);
            }
            Floats row(k);
            weight_row(weights.layer, n - 1, row.data());
            report("weight row " + of, row);
        }
}

void check_elementwise() {
    for (int width : {1, 7, 16, 20, 63, 64, 97, 576}) {
        Random random(width);
        const std::string of = " " + std::to_string(width);
        const Floats x = random.floats(2 * width, 4.0f), weight = random.floats(width);
        Floats y(width), z = random.floats(width);
        norm_row(x.data(), weight.data(), width, 1e-5f, y.data());
        report("norm" + of, y);
        gate_row<silu>(x.data(), x.data() + width, width, y.data());
        report("silu" + of, y);
        gate_row<gelu_tanh>(x.data(), x.data() + width, width, y.data());
        report("gelu" + of, y);
        add_row(x.data(), 0.3f, width, z.data());
        report("add" + of, z);
        scale_row(z.data(), 1.7f, width);
        report("scale" + of, z);
        softcap_row(z.data(), 3.0f, width);
        report("softcap" + of, z);
        Floats head = random.floats(2 * width + 5), cos = random.floats(width), sin = random.floats(width);
        rotate_head(head.data(), cos.data(), sin.data(), width);
        report("rotate" + of, head);
    }
    // One float in a few thousand of all there are, infinities and NaN among them.
    Hash exp2, tanhs, rounded;
    for (uint32_t bits = 0; bits < 0xff900000u - 40009; bits += 40009) {
        vf x = (vf)(vi)splat(0.0f), y;
        float value;
        memcpy(&value, &bits, 4);
        x = splat(value);
        y = exp2_nonpositive(splat(-std::fabs(value)));
        exp2.add(y[0]);
        y = tanh(x);
        tanhs.add(y[kWidth - 1]);
        bf16 narrow[kWidth];
        store(narrow, x);
        rounded.add(to_float(narrow[kWidth - 1]));
    }
    exp2.print("exp2 of many");
    tanhs.print("tanh of many");
    rounded.print("bf16 of many");
}

struct Scene {
    const char* name;
    int heads, kv_heads, k_dim, v_dim, block_size, window;
    float softcap;
    bool sinks;
};

// Sequences in all states at once: a decode step, prompts with and without what came before, a long context.
template <class Row, class Pool>
void check_attention(const Scene& scene, const std::string& types) {
    Random random(scene.k_dim * 7 + scene.block_size);
    const int lengths[] = {1, 1, 23, 70, 5, 1}, contexts[] = {1, 130, 23, 150, 69, 300};
    constexpr int num_seqs = 6, most_context = 300;
    const int table_stride = (most_context + scene.block_size - 1) / scene.block_size;
    const int num_blocks = num_seqs * table_stride;
    const int64_t key = (int64_t)scene.kv_heads * scene.block_size * scene.k_dim;
    const int64_t stride = key + (int64_t)scene.kv_heads * scene.block_size * scene.v_dim;
    std::vector<int32_t> starts = {0}, tables;
    for (int i = 0; i < num_blocks; i++) tables.push_back((i * 7 + 3) % num_blocks);
    if (num_blocks % 7 == 0)
        for (int i = 0; i < num_blocks; i++) tables[i] = num_blocks - 1 - i;
    std::vector<int64_t> row_blocks, row_offsets;
    for (int s = 0; s < num_seqs; s++) {
        starts.push_back(starts[s] + lengths[s]);
        for (int p = contexts[s] - lengths[s]; p < contexts[s]; p++) {
            row_blocks.push_back(tables[s * table_stride + p / scene.block_size]);
            row_offsets.push_back(p % scene.block_size);
        }
    }
    const int num_rows = starts[num_seqs], keys = scene.heads * scene.k_dim;
    const int values = keys + scene.kv_heads * scene.k_dim;
    const int width = values + scene.kv_heads * scene.v_dim;
    const Floats sinks = random.floats(scene.heads), rows = random.floats((int64_t)num_rows * width, 2.0f);
    const Floats pool = random.floats(num_blocks * stride, 2.0f);
    std::vector<Row> typed_rows, out((int64_t)num_rows * scene.heads * scene.v_dim);
    std::vector<Pool> typed_pool;
    if constexpr (sizeof(Row) == 2) typed_rows = narrow(rows);
    else typed_rows = rows;
    if constexpr (sizeof(Pool) == 2) typed_pool = narrow(pool);
    else typed_pool = pool;
    const Layer layer = {0, key, scene.sinks ? sinks.data() : nullptr, scene.heads, scene.kv_heads, scene.k_dim,
                         scene.v_dim, scene.window, sizeof(Pool) == 2, 1.0f / std::sqrt((float)scene.k_dim),
                         scene.softcap};
    const Batch batch = {typed_pool.data(), stride, starts.data(), contexts, tables.data(), row_blocks.data(),
                         row_offsets.data(), table_stride, num_seqs, num_rows, scene.block_size};
    const Row* first = typed_rows.data();
    const Rows step = {first, first + keys, first + values, out.data(), width, scene.k_dim,
                       width, scene.k_dim, width, scene.v_dim, num_rows, sizeof(Row) == 2};
    attend(layer, batch, step, scene.sinks ? 3 : 1);
    report(std::string("attention ") + scene.name + types, out.data(), (int64_t)out.size());
    report(std::string("attention ") + scene.name + types + " pool", typed_pool.data(), (int64_t)typed_pool.size());
}

void check_attentions() {
    const Scene scenes[] = {
        {"9 heads on 3 of 64", 9, 3, 64, 64, 16, 0, 0, false},
        {"window", 4, 4, 80, 80, 16, 40, 0, false},
        {"softcap", 8, 2, 32, 32, 5, 0, 20.0f, false},
        {"sinks", 8, 1, 24, 24, 16, 33, 0, true},
        {"odd sizes", 3, 1, 21, 13, 7, 0, 0, false},
        {"192 and 128", 2, 2, 192, 128, 32, 0, 0, false},
    };
    for (const Scene& scene : scenes) {
        check_attention<float, float>(scene, " f32 on f32");
        check_attention<float, bf16>(scene, " f32 on bf16");
        check_attention<bf16, float>(scene, " bf16 on f32");
        check_attention<bf16, bf16>(scene, " bf16 on bf16");
    }
}

// A small model's step: every operation there is.
void check_step(Kind kind) {
    enum { kHidden, kNormed, kFused, kAttended, kGated, kLogits, kBuffers };
    constexpr int kWide = 64, kFeed = 96, kVocabulary = 50, kHeads = 2, kDim = 20, num_rows = 9;
    Random random(kind + 50);
    const int fused = kHeads * 3 * 32;
    const Weights embedding(kind, kVocabulary, kWide, false, random), into(kind, fused, kWide, true, random);
    const Weights output(kind, kWide, kHeads * 32, false, random), up(kind, 2 * kFeed, kWide, false, random);
    const Weights down(kind, kWide, kFeed, true, random);
    const Linear linears[] = {embedding.layer, into.layer, output.layer, up.layer, down.layer};
    const Layer layer = {0, kHeads * 4 * 32, nullptr, kHeads, kHeads, 32, 32, 0, 0, 0.2f, 0};
    const Floats norm = random.floats(kWide), head_norm = random.floats(32), cos = random.floats(num_rows * kDim / 2);
    const Floats sin = random.floats(num_rows * kDim / 2);
    const float *norms[] = {norm.data()}, *cosines[] = {cos.data()}, *sines[] = {sin.data()};
    const Rotation rotation = {kHeads, kHeads, 32, kDim, 0, 1e-6f, head_norm.data(), head_norm.data()};
    const int32_t widths[kBuffers] = {kWide, kWide, fused, kHeads * 32, kFeed, kVocabulary};
    const Op ops[] = {
        {kEmbed, kHidden, kHidden, 0, 0.05f, 0},    {kNorm, kHidden, kNormed, 0, 1e-6f, 0},
        {kLinear, kNormed, kFused, 1, 0, 0},        {kRotate, kFused, kFused, 0, 0, 0},
        {kAttend, kFused, kAttended, 0, 0, 0},      {kLinear, kAttended, kHidden, 2, 0, 1},
        {kAdd, kNormed, kHidden, 0, 0.5f, 0},       {kNorm, kHidden, kNormed, 0, 1e-6f, 0},
        {kLinear, kNormed, kFused, 3, 0, 0},        {kGate, kFused, kGated, kGeluTanh, 0, 0},
        {kLinear, kGated, kHidden, 4, 0, 1},        {kGather, kHidden, kHidden, 0, 0, 0},
        {kNorm, kHidden, kNormed, 0, 1e-6f, 0},     {kLinear, kNormed, kLogits, 0, 0, 0},
        {kScale, kLogits, kLogits, 0, 0.5f, 0},     {kSoftcap, kLogits, kLogits, 0, 30.0f, 0},
    };
    const int num_ops = sizeof ops / sizeof *ops;
    const Program program = {ops, linears, &layer, norms, &rotation, widths, num_ops, kBuffers, kLogits};
    Floats pool(5 * 2 * kHeads * 4 * 32), logits(4 * kVocabulary);
    const int32_t starts[] = {0, 6, 9}, contexts[] = {6, 3}, tables[] = {2, 4, 1, 0};
    const int64_t row_blocks[] = {2, 2, 2, 2, 4, 4, 1, 1, 1}, row_offsets[] = {0, 1, 2, 3, 0, 1, 0, 1, 2};
    const int64_t ids[] = {3, 1, 4, 1, 5, 9, 2, 49, 48}, wanted[] = {1, 5, 7, 8};
    const Batch batch = {pool.data(), 2 * kHeads * 4 * 32, starts, contexts, tables, row_blocks, row_offsets, 2, 2,
                         num_rows, 4};
    Step step = {};
    step.batch = batch, step.ids = ids, step.cos = cosines, step.sin = sines, step.logit_rows = wanted;
    step.out = logits.data(), step.num_logits = 4, step.threads = 2;
    baton_step(&program, &step);
    report(std::string("step ") + kKinds[kind], logits);
    report(std::string("step ") + kKinds[kind] + " pool", pool);
}

}  // namespace

int main() {
    check_elementwise();
    check_attentions();
    check_linear();
    for (int kind = F32; kind <= Q4; kind++) check_step((Kind)kind);
    puts("end");
}
