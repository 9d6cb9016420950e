// Threads that share one list of small tasks at a time. Tasks are taken one by one, so a thread that lost its core
// delays the others by one task at most; nobody waits for a thread that took none.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdint.h>
#include <thread>
#include <vector>

class Pool {
  public:
    // task(context, index, thread); thread is 0..threads-1 and belongs to one thread for the whole task
    typedef void (*Task)(void *context, int64_t index, int thread);

    explicit Pool(int threads);
    ~Pool();
    int threads() const { return (int)workers.size() + 1; }
    // Run tasks 0..total-1; the caller takes part, and returns when all are done.
    void run(int64_t total, Task task, void *context);

  private:
    void worker(int thread);
    void take(uint32_t epoch, int thread);

    std::vector<std::thread> workers;
    alignas(64) std::atomic<uint64_t> ticket{0};  // epoch << 32 | next task
    alignas(64) std::atomic<uint32_t> done{0};
    alignas(64) std::atomic<uint32_t> total{0};
    std::atomic<Task> task{nullptr};
    std::atomic<void *> context{nullptr};
    std::atomic<int> sleepers{0};
    std::atomic<bool> closing{false};
    std::mutex mutex;
    std::condition_variable wake;
};
