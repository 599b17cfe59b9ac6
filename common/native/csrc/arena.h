// Scratch memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

constexpr int kLine = 64;  // bytes of a cache line

inline int round_up(int64_t x, int unit) { return (int)((x + unit - 1) / unit * unit); }

// Memory of one thread, kept from call to call.
class Arena {
  public:
    ~Arena() { free(memory_); }

    // Makes room for `bytes` in all and takes from the start again. False: there is no memory.
    bool reset(size_t bytes) {
        if (bytes > size_) {
            free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = static_cast<char*>(aligned_alloc(kLine, size_));
            if (!memory_) size_ = 0;
        }
        used_ = 0;
        return memory_ != nullptr;
    }
    template <class T>
    T* take(int64_t count) {
        T* start = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes<T>(count);
        return start;
    }
    template <class T>
    static size_t bytes(int64_t count) {
        return (count * sizeof(T) + kLine - 1) / kLine * kLine;
    }

  private:
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

}  // namespace
