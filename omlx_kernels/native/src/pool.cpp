#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace omlx {
namespace {

struct Job {
    void (*body)(void*, int64_t);
    void* context;
    int64_t count;
    int64_t helpers;     // pool threads that may still join; under the pool's mutex
    int64_t active = 0;  // pool threads at work; under the pool's mutex
    std::atomic<int64_t> next{0};

    void work() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
            body(context, i);
    }
};

class Pool {
  public:
    void run(Job& job) {
        const int64_t wanted = job.helpers;
        {
            std::lock_guard lock(mutex_);
            grow(wanted);
            jobs_.push_back(&job);
        }
        for (int64_t i = 0; i < wanted; ++i) wake_.notify_one();
        job.work();
        std::unique_lock lock(mutex_);
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        done_.wait(lock, [&] { return job.active == 0; });
    }

  private:
    void grow(int64_t wanted) {
        for (; size_ < wanted; ++size_) {
            try {
                std::thread([this] { serve(); }).detach();
            } catch (const std::system_error&) {
                return;  // no more threads to be had: the caller does the work
            }
        }
    }

    Job* joinable() {
        for (Job* job : jobs_)
            if (job->helpers > 0 && job->next.load(std::memory_order_relaxed) < job->count)
                return job;
        return nullptr;
    }

    void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            wake_.wait(lock, [&] { return (job = joinable()) != nullptr; });
            --job->helpers;
            ++job->active;
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->active == 0) done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<Job*> jobs_;
    int64_t size_ = 0;
};

// Never destroyed: its threads sleep in it until the process ends.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
    Pool* current = the_pool.load();
    if (!current) {
        static const int registered =
            pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
        (void)registered;
        Pool* fresh = new Pool;
        if (the_pool.compare_exchange_strong(current, fresh)) return *fresh;
        delete fresh;
    }
    return *current;
}

}  // namespace

void run_in_pool(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
    threads = std::min<int64_t>(std::min(threads, count), 1024);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) body(context, i);
        return;
    }
    Job job{body, context, count, threads - 1};
    pool().run(job);
}

}  // namespace omlx
