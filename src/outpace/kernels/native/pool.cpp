#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void pause_cpu() { _mm_pause(); }
#else
static inline void pause_cpu() { std::this_thread::yield(); }
#endif

// Pauses before an idle worker sleeps: about 100 microseconds, the gap between two layers and not between two passes.
static const int SPINS = 2000;

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers.emplace_back(&Pool::worker, this, i);
}

Pool::~Pool() {
    closing = true;
    {
        std::lock_guard<std::mutex> lock(mutex);
        wake.notify_all();
    }
    for (auto &thread : workers) thread.join();
}

void Pool::run(int64_t count, Task function, void *argument) {
    if (workers.empty() || count < 2) {
        for (int64_t i = 0; i < count; i++) function(argument, i, 0);
        return;
    }
    // Shut the old list before its total changes: a late worker must not find room in it.
    uint32_t epoch = (uint32_t)(ticket.load(std::memory_order_relaxed) >> 32);
    ticket.store((uint64_t)epoch << 32 | UINT32_MAX);
    task.store(function, std::memory_order_relaxed);
    context.store(argument, std::memory_order_relaxed);
    total.store((uint32_t)count, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    ticket.store((uint64_t)++epoch << 32);
    if (sleepers.load()) {
        std::lock_guard<std::mutex> lock(mutex);
        wake.notify_all();
    }
    take(epoch, 0);
    while (done.load(std::memory_order_acquire) != (uint32_t)count) pause_cpu();
}

// What is read before the exchange belongs to `epoch` if the exchange succeeds: the next list cannot be set up before
// every task of this one is done.
void Pool::take(uint32_t epoch, int thread) {
    for (;;) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        if ((uint32_t)(seen >> 32) != epoch || (uint32_t)seen >= total.load(std::memory_order_relaxed)) return;
        Task function = task.load(std::memory_order_relaxed);
        void *argument = context.load(std::memory_order_relaxed);
        if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
        function(argument, (uint32_t)seen, thread);
        done.fetch_add(1, std::memory_order_release);
    }
}

void Pool::worker(int thread) {
    uint32_t last = 0;
    for (;;) {
        int spins = 0;
        while ((uint32_t)(ticket.load(std::memory_order_acquire) >> 32) == last) {
            if (closing.load(std::memory_order_relaxed)) return;
            if (spins++ < SPINS) {
                pause_cpu();
                continue;
            }
            std::unique_lock<std::mutex> lock(mutex);
            sleepers++;
            wake.wait(lock, [&] { return closing || (uint32_t)(ticket.load() >> 32) != last; });
            sleepers--;
        }
        last = (uint32_t)(ticket.load(std::memory_order_acquire) >> 32);
        take(last, thread);
    }
}
