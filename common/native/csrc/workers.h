// Threads that help one call at a time: no OpenMP (torch brings its own runtime), no spinning but within a shift.
//
//   1. A call opens a round and deals its items out one by one. Nobody waits for a worker that comes late: whoever
//      has joined by the time the items are gone is waited for, and a late one finds the round closed.
//   2. Workers sleep. Within a shift (one engine step) they look for the next round for kSpin first, as waking one
//      takes longer than most operations of a small step.
//   3. Some workers use their node's own cores, others lent ones (loans.h): between items, and while they look for the
//      next round, these look whether the core's owner works, and stop if so. They run in the shortest slices that the
//      kernel knows, so that the owner need not wait to say that it works. No lower priority: where every core is
//      busy, it would leave an item that has begun, and so the whole step, lying for seconds.
//   4. A lent core that somebody keeps busy whom the file does not know makes us wait: a shift that waits for most of
//      its time borrows nothing for a while, ever longer.
//   5. Who runs an item never changes its result.

#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "loans.h"

namespace {

constexpr int kMostWorkers = 128;  // of a kind
constexpr int64_t kSpin = 50'000;           // ns
constexpr int64_t kLook = 20'000;           // ns between two looks at an owner: each is a system call
constexpr int64_t kAskAgain = 1'000'000;    // ns until a shift that could not borrow a core asks again
constexpr int64_t kJudged = 10'000'000;     // ns after which a shift looks whether it gained by borrowing
constexpr int64_t kShortestPause = 100'000'000, kLongestPause = 10'000'000'000;  // ns, where it did not

inline int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

class Workers {
  public:
    // run(i) for i in 0 .. count, on this thread and up to `threads - 1` others; returns when all are done.
    // Single-threaded when another call or shift holds the workers.
    template <class Run>
    void each(int count, int threads, Run run) {
        threads = std::min(threads, count);
        const bool on_shift = this_threads_shift();
        if (threads <= 1 || !(on_shift || busy_.try_lock())) {
            for (int i = 0; i < count; i++) run(i);
            return;
        }
        next_.store(0, std::memory_order_relaxed);
        count_ = count;
        call_ = [](void* context, int i) { (*static_cast<Run*>(context))(i); };
        context_ = &run;
        open(threads - 1);
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) run(i);
        close();
        if (!on_shift) busy_.unlock();
    }

    // From here to end_shift the workers serve this thread alone. False, and no shift, if they serve another.
    bool begin_shift(int own, Loans* loans) {
        if ((own <= 1 && !loans) || this_threads_shift() || !busy_.try_lock()) return false;
        this_threads_shift() = true;
        own_ = std::min(own, kMostWorkers + 1);
        loans_ = loans;
        if (loans) taken_.assign(loans->count, false);
        judged_ = now_ns();
        waited_ = asked_ = 0;
        on_shift_ = true;
        return true;
    }

    void end_shift() {
        on_shift_ = false;
        if (loans_) {
            judge(now_ns());
            give_all_back();
            loans_->borrowed_ns += borrowed_.exchange(0);
        }
        this_threads_shift() = false;
        busy_.unlock();
    }

    // How many threads the shift's next call may use.
    int threads() {
        if (!loans_) return own_;
        for (int lent = num_lent_ - 1; lent >= 0; lent--)
            if (lent_[lent].lost.load(std::memory_order_relaxed)) give_back(lent);
        const int64_t now = now_ns();
        if (now - judged_ > kJudged) {
            if (judge(now)) give_all_back();
            judged_ = now;
            waited_ = 0;
        }
        if (now - asked_ > kAskAgain && now > no_use_until_) {
            asked_ = now;
            borrow();
        }
        return own_ + num_lent_;
    }

  private:
    struct alignas(128) Worker {
        std::condition_variable wake;
        std::atomic<bool> asleep{false};
        std::atomic<int> fd{-1};
        // Of one on a lent core:
        std::atomic<int64_t> owner{kNobody};  // the byte that the core's owner locks
        std::atomic<bool> lost{true};         // the owner wants the core back
        int64_t looked = 0;                   // when; the worker's business alone
        int loan = 0;                         // its place in the shift's loans; the shift's business alone
    };
    enum Kind { kOwn, kLent };
    // A round in one word: its number, whether it is open, how many workers of each kind may join, how many have.
    static constexpr uint64_t kJoined = 0x7fff, kOpen = 1ull << 31;
    static constexpr int kInvited[] = {15, 23};
    static int invited(uint64_t round, Kind kind) { return (int)(round >> kInvited[kind] & 0xff); }

    static bool& this_threads_shift() {
        thread_local bool holds = false;
        return holds;
    }

    // --- the thread that is helped ---

    void open(int wanted) {
        const int num_own = on_shift_ ? std::min(wanted, own_ - 1) : std::min(wanted, kMostWorkers);
        const int own = grow(kOwn, num_own), lent = grow(kLent, wanted > num_own && on_shift_ ? wanted - num_own : 0);
        number_++;
        round_.store(number_ << 32 | kOpen | (uint64_t)lent << kInvited[kLent] | (uint64_t)own << kInvited[kOwn]);
        wake(workers_, own);
        wake(lent_, lent);
    }

    void wake(Worker* workers, int count) {
        for (int i = 0; i < count; i++) {
            if (!workers[i].asleep.exchange(false)) continue;
            std::lock_guard<std::mutex> lock(mutex_);
            workers[i].wake.notify_one();
        }
    }

    void close() {
        if ((round_.fetch_and(~kOpen) & kJoined) == 0) return;
        const int64_t began = now_ns();
        for (int64_t now = began; (round_ & kJoined) && now - began < kSpin; now = now_ns()) pause_briefly();
        if (round_ & kJoined) {
            std::unique_lock<std::mutex> lock(mutex_);
            waits_ = true;
            done_.wait(lock, [this] { return (round_ & kJoined) == 0; });
            waits_ = false;
        }
        waited_ += now_ns() - began;
    }

    // Whether the shift lost by borrowing; then it is not to be tried again soon.
    bool judge(int64_t now) {
        if (num_lent_ == 0) return false;
        if (waited_ <= (now - judged_) / 2) {
            if (now - judged_ > kJudged) pause_ = kShortestPause;
            return false;
        }
        pause_ = std::min(2 * pause_, kLongestPause);
        no_use_until_ = now + pause_;
        return true;
    }

    void borrow() {
        int64_t busy = kNobody;
        for (int loan = 0; loan < loans_->count && num_lent_ < kMostWorkers; loan++) {
            const int64_t owner = loans_->owners[loan];
            if (taken_[loan] || (owner != kNobody && owner == busy)) continue;
            if (owner != kNobody && byte_is_locked(loans_->fd, owner)) {
                busy = owner;
                continue;
            }
            if (!lock_byte(loans_->fd, loans_->cores[loan])) continue;  // another borrower's
            taken_[loan] = true;
            Worker& worker = lent_[num_lent_++];
            worker.fd = loans_->fd;
            worker.owner = owner;
            worker.loan = loan;
            worker.lost = false;
        }
    }

    // The last one's worker takes over the core of the one that goes.
    void give_back(int lent) {
        Worker &goes = lent_[lent], &last = lent_[--num_lent_];
        unlock_byte(loans_->fd, loans_->cores[goes.loan]);
        taken_[goes.loan] = false;
        goes.loan = last.loan;
        goes.owner = last.owner.load();
        goes.lost = last.lost.load();
        last.lost = true;  // until it is lent a core again
    }

    void give_all_back() {
        while (num_lent_ > 0) give_back(num_lent_ - 1);
    }

    // Detached: they sleep until the process ends. A forked child has none of its parent's and starts its own;
    // where the system gives no more threads, fewer do the work.
    int grow(Kind kind, int wanted) {
        if (process_ != getpid()) {
            process_ = getpid();
            started_[kOwn] = started_[kLent] = 0;
        }
        int& started = started_[kind];
        if (started >= wanted) return wanted;
        sigset_t all, before;  // signals are the caller's: a new thread inherits the mask
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; started < wanted; started++) std::thread(&Workers::loop, this, kind, started).detach();
        } catch (const std::system_error&) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return std::min(started, wanted);
    }

    // --- a worker ---

    void loop(Kind kind, int index) {
        Worker& me = kind == kLent ? lent_[index] : workers_[index];
        pthread_setname_np(pthread_self(), kind == kLent ? "baton lent core" : "baton worker");
        if (kind == kLent) keep_slices_short();
        for (uint64_t seen = 0;;) {
            if (!join(kind, index, seen) && !spin(me, kind, index, seen)) {
                sleep(me, kind, index, seen);
                continue;
            }
            if (kind == kLent)
                help(me);
            else
                while (run_next()) {}
            if (((round_.fetch_sub(1) - 1) & kJoined) == 0 && waits_) {
                std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_one();
            }
        }
    }

    // The calling thread alone; from Linux 6.12 on, without effect before.
    static void keep_slices_short() {
        struct {
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t runtime, deadline, period;
        } attributes = {};
        attributes.size = sizeof attributes;
        attributes.policy = SCHED_OTHER;
        attributes.nice = getpriority(PRIO_PROCESS, 0);
        attributes.runtime = 100'000;  // ns
        syscall(SYS_sched_setattr, 0, &attributes, 0);
    }

    static bool wanted(uint64_t round, Kind kind, int index, uint64_t seen) {
        return (round & kOpen) && round >> 32 != seen && index < invited(round, kind);
    }

    bool join(Kind kind, int index, uint64_t& seen) {
        uint64_t round = round_;
        while (wanted(round, kind, index, seen))
            if (round_.compare_exchange_weak(round, round + 1)) {
                seen = round >> 32;
                return true;
            }
        return false;
    }

    bool spin(Worker& me, Kind kind, int index, uint64_t& seen) {
        const int64_t began = now_ns();
        while (on_shift_ && !(kind == kLent && taken_back(me)) && now_ns() - began < kSpin)
            for (int i = 0; i < 32; i++) {
                if (join(kind, index, seen)) return true;
                pause_briefly();
            }
        return false;
    }

    void sleep(Worker& me, Kind kind, int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        me.asleep = true;
        if (wanted(round_, kind, index, seen)) me.asleep = false;
        me.wake.wait(lock, [&] { return !me.asleep; });
    }

    void help(Worker& me) {
        const int64_t began = now_ns();
        while (!taken_back(me) && run_next()) {}
        borrowed_ += now_ns() - began;
    }

    bool run_next() {
        const int i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i >= count_) return false;
        call_(context_, i);
        return true;
    }

    static bool taken_back(Worker& me) {
        const int64_t owner = me.owner.load(std::memory_order_relaxed);
        if (!me.lost.load(std::memory_order_relaxed)) {
            const int64_t now = now_ns();
            if (owner == kNobody || now - me.looked < kLook) return false;
            me.looked = now;
            if (!byte_is_locked(me.fd, owner)) return false;
            me.lost = true;
        }
        return true;
    }

    // A cache line that two cores write to takes a fifth of a microsecond from one to the other.
    alignas(128) std::atomic<uint64_t> round_{0};
    int count_ = 0;  // of the round, like the next two: written while it is closed
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(128) std::atomic<int> next_{0};
    alignas(128) std::atomic<int64_t> borrowed_{0};
    alignas(128) std::atomic<bool> waits_{false}, on_shift_{false};
    std::mutex busy_;  // held by the call or the shift that the workers serve
    std::mutex mutex_;
    std::condition_variable done_;
    Worker workers_[kMostWorkers], lent_[kMostWorkers];
    int started_[2] = {};
    uint64_t number_ = 0;
    pid_t process_ = 0;
    // of the shift
    Loans* loans_ = nullptr;
    std::vector<bool> taken_;
    int own_ = 1, num_lent_ = 0;
    int64_t judged_ = 0, waited_ = 0, asked_ = 0, no_use_until_ = 0, pause_ = kShortestPause;
};

// The workers of this process.
inline Workers& workers() {
    static Workers* forever = new Workers;  // its threads outlive static destructors
    return *forever;
}

}  // namespace
