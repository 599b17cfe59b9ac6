// Philox4x32-10 for consecutive counters; see common/model/philox.py, which gives the same words without it.
#include <cstdint>

namespace {

constexpr int kLanes = 8;  // counters at a time: the compiler turns the inner loops into vectors
constexpr int kRounds = 10;
constexpr std::uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

}  // namespace

// Words of the counters (i, low, high, 0), i = 0 .. num_counters, at out[4 * i].
extern "C" __attribute__((visibility("default"))) void baton_philox(std::uint32_t key0, std::uint32_t key1,
                                                                   std::uint32_t low, std::uint32_t high,
                                                                   std::int64_t num_counters, std::uint32_t* out) {
    for (std::int64_t first = 0; first < num_counters; first += kLanes) {
        std::uint64_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            c0[i] = static_cast<std::uint32_t>(first + i);
            c1[i] = low;
            c2[i] = high;
            c3[i] = 0;
        }
        std::uint32_t k0 = key0, k1 = key1;
        for (int round = 0; round < kRounds; ++round) {
            for (int i = 0; i < kLanes; ++i) {
                const std::uint64_t product0 = c0[i] * kMultiplier0, product1 = c2[i] * kMultiplier1;
                c0[i] = (product1 >> 32) ^ c1[i] ^ k0;
                c1[i] = product1 & 0xFFFFFFFF;
                c2[i] = (product0 >> 32) ^ c3[i] ^ k1;
                c3[i] = product0 & 0xFFFFFFFF;
            }
            k0 += kWeyl0;
            k1 += kWeyl1;
        }
        for (int i = 0; i < kLanes && first + i < num_counters; ++i) {
            std::uint32_t* words = out + 4 * (first + i);
            words[0] = static_cast<std::uint32_t>(c0[i]);
            words[1] = static_cast<std::uint32_t>(c1[i]);
            words[2] = static_cast<std::uint32_t>(c2[i]);
            words[3] = static_cast<std::uint32_t>(c3[i]);
        }
    }
}
