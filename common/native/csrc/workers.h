// Threads that help one call at a time and sleep in between: no OpenMP (torch brings its own runtime), no spinning.

#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

class Workers {
  public:
    // run(i) for i in 0 .. count, on this thread and up to `threads - 1` others; returns when all are done.
    // Single-threaded when another call holds the workers: who runs an item never changes its result.
    template <class Run>
    void each(int count, int threads, Run run) {
        if (threads > count) threads = count;
        std::unique_lock<std::mutex> owner(busy_, std::defer_lock);
        if (threads <= 1 || !owner.try_lock()) {
            for (int i = 0; i < count; i++) run(i);
            return;
        }
        next_ = 0;
        count_ = count;
        call_ = [](void* context, int i) { (*static_cast<Run*>(context))(i); };
        context_ = &run;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            grow(threads - 1);
            invited_ = active_ = threads - 1 < started_ ? threads - 1 : started_;
            round_++;
        }
        wake_.notify_all();
        drain();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return active_ == 0; });
    }

  private:
    void drain() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(context_, i);
    }

    // Detached: they sleep until the process ends. A forked child has none of its parent's and starts its own;
    // where the system gives no more threads, fewer do the work.
    void grow(int wanted) {
        if (process_ != getpid()) {
            process_ = getpid();
            started_ = 0;
        }
        sigset_t all, before;  // signals are the caller's: a new thread inherits the mask
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; started_ < wanted; started_++) std::thread(&Workers::loop, this, started_, round_).detach();
        } catch (const std::system_error&) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void loop(int index, long seen) {
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (index >= invited_) continue;
            }
            drain();
            std::lock_guard<std::mutex> lock(mutex_);
            if (--active_ == 0) done_.notify_one();
        }
    }

    std::mutex busy_;  // held by the call that the workers serve
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<int> next_{0};
    int count_ = 0, invited_ = 0, active_ = 0, started_ = 0;
    long round_ = 0;
    pid_t process_ = 0;
    void (*call_)(void*, int) = nullptr;
    void* context_ = nullptr;
};

// The workers of this process.
inline Workers& workers() {
    static Workers* forever = new Workers;  // its threads outlive static destructors
    return *forever;
}

}  // namespace
