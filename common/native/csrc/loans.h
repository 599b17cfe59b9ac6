// Cores that other nodes of this host do not use right now. Mirrored in common/native/abi.py; common/cores.py says
// which byte of the host's file means what. A lock is one system call, half a microsecond, and ends with its process.

#pragma once

#include <fcntl.h>

#include <cstdint>

struct Loans {
    const int64_t* cores;   // [count] the byte that whoever uses the core beside its owner locks
    const int64_t* owners;  // [count] the byte that its owner locks while it works, or kNobody; equal ones adjoin
    int32_t count, fd;
    int64_t borrowed_ns;  // added to: for how long borrowed cores computed
};

namespace {

constexpr int64_t kNobody = -1;

inline struct flock one_byte(short type, int64_t byte) {
    struct flock lock = {};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
}

// Whether somebody else has locked the byte; so it seems where nobody can tell.
inline bool byte_is_locked(int fd, int64_t byte) {
    struct flock lock = one_byte(F_WRLCK, byte);
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

inline bool lock_byte(int fd, int64_t byte) {
    struct flock lock = one_byte(F_WRLCK, byte);
    return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

inline void unlock_byte(int fd, int64_t byte) {
    struct flock lock = one_byte(F_UNLCK, byte);
    fcntl(fd, F_OFD_SETLK, &lock);
}

}  // namespace
