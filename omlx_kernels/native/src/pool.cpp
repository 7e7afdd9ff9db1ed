#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "abi.h"

namespace omlx {
namespace {

int64_t now_ns() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

struct Job {
    void (*body)(void*, int64_t);
    void* context;
    int64_t count;
    int64_t helpers;     // pool threads that may still join; under the pool's mutex
    int64_t active = 0;  // pool threads at work; under the pool's mutex
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done_at{0};  // when a thread last finished an index

    void work() {
        int64_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) return;
        for (; i < count; i = next.fetch_add(1, std::memory_order_relaxed)) body(context, i);
        const int64_t time = now_ns();
        for (int64_t seen = done_at; seen < time && !done_at.compare_exchange_weak(seen, time);) {
        }
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

// libgomp's entry to a parallel region. Waiting longer than this for idle members of the team sends
// so many calls to the pool.
using OpenMP = void (*)(void (*)(void*), void*, unsigned, unsigned);
constexpr int64_t LONG_WAIT_NS = 2'000'000;
constexpr int CALLS_WITHOUT_TEAM = 32;
std::atomic<OpenMP> openmp{nullptr};
std::atomic<int> calls_without_team{0};

void forget_threads_after_fork() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        the_pool.store(nullptr);
        openmp.store(nullptr);
    });
    (void)registered;
}

Pool& pool() {
    Pool* current = the_pool.load();
    if (!current) {
        forget_threads_after_fork();
        Pool* fresh = new Pool;
        if (the_pool.compare_exchange_strong(current, fresh)) return *fresh;
        delete fresh;
    }
    return *current;
}

void run_in_team(OpenMP parallel, Job& job) {
    parallel([](void* j) { static_cast<Job*>(j)->work(); }, &job,
             static_cast<unsigned>(job.helpers + 1), 0);
    if (now_ns() - job.done_at > LONG_WAIT_NS) calls_without_team = CALLS_WITHOUT_TEAM;
}

}  // namespace

void run_in_threads(int64_t count, int64_t threads, void (*body)(void*, int64_t), void* context) {
    threads = std::min<int64_t>(std::min(threads, count), 1024);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) body(context, i);
        return;
    }
    Job job{body, context, count, threads - 1};
    const OpenMP parallel = openmp.load(std::memory_order_relaxed);
    if (parallel && calls_without_team.load(std::memory_order_relaxed) <= 0) {
        run_in_team(parallel, job);
    } else {
        if (parallel) calls_without_team.fetch_sub(1, std::memory_order_relaxed);
        pool().run(job);
    }
}

}  // namespace omlx

OMLX_API void omlx_share_openmp(void* parallel) {
    omlx::forget_threads_after_fork();
    omlx::openmp = reinterpret_cast<omlx::OpenMP>(parallel);
    omlx::calls_without_team = 0;
}
