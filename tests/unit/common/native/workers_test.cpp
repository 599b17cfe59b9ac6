// Workers and lent cores, for test_workers.py. As a program (-DSTRESS) for ThreadSanitizer.

#include "workers.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Each item: what the test does with it, then who ran it. `reached` is called on the thread of item `at`.
struct Call {
    int32_t count, threads, at;
    void (*reached)();
    std::atomic<int32_t>* times_run;  // [count]
    std::atomic<int32_t> by_others;
    std::atomic<int32_t> after;  // items that others began after `reached`
    std::atomic<bool> was_reached;
};

static Workers* current = nullptr;

static void run(Call& call) {
    const auto caller = std::this_thread::get_id();
    current->each(call.count, call.threads, [&](int i) {
        const bool other = std::this_thread::get_id() != caller;
        if (call.was_reached && other) call.after++;
        call.times_run[i]++;
        if (other) call.by_others++;
        if (i == call.at && call.reached) {
            call.reached();
            call.was_reached = true;
        }
        const int64_t until = now_ns() + 30'000;
        while (now_ns() < until) pause_briefly();
    });
}

// Workers that have learnt nothing yet. Those before them sleep for good, as their threads do.
EXPORT void renew() { current = new Workers; }
EXPORT int begin_shift(int own, Loans* loans) { return current->begin_shift(own, loans); }
EXPORT void end_shift() { current->end_shift(); }
EXPORT int threads() { return current->threads(); }
EXPORT void each(Call* call) { run(*call); }

#ifdef STRESS
#include <cstdio>

// Three threads at a time, one of them with a lent core whose owner comes and goes.
int main(int, char** arguments) {
    const int fd = open(arguments[1], O_RDWR | O_CREAT, 0600), owner = open(arguments[1], O_RDWR);
    const int64_t cores[] = {10, 11, 12}, owners[] = {1, 1, kNobody};
    std::atomic<bool> ends{false};
    std::atomic<long> sum{0};
    std::thread neighbour([&] {
        while (!ends) {
            lock_byte(owner, 1);
            std::this_thread::yield();
            unlock_byte(owner, 1);
            std::this_thread::yield();
        }
    });
    auto work = [&](int own, int count) {
        Loans loans = {cores, owners, 3, fd, 0};
        for (int step = 0; step < 200; step++) {
            const bool on_shift = workers().begin_shift(own, &loans);
            for (int round = 0; round < 20; round++)
                workers().each(count, on_shift ? workers().threads() : own, [&](int i) { sum += i; });
            if (on_shift) workers().end_shift();
        }
    };
    std::thread other(work, 2, 7);
    work(1, 9);
    other.join();
    ends = true;
    neighbour.join();
    const long wanted = 200 * 20 * (7 * 6 / 2 + 9 * 8 / 2);
    printf("%s\n", sum == wanted ? "right" : "wrong");
    _exit(sum != wanted);
}
#endif
