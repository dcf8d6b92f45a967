// A few threads that run one function together, meet at barriers, and share out the work between two barriers.
//
// A decode step is some 150 phases of 10 to 100 microseconds; starting a thread team for each would cost as much as the
// work. Here the team starts once per call, and a phase ends with a barrier that spins for a while before it sleeps.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace transect {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int SPINS = 2000;  // some 20 to 50 microseconds: longer than teammates are apart when the machine is ours

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads), shares_(threads_) {
    for (int i = 1; i < threads_; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Runs `body(thread)` on every thread of the team; returns when all are done.
  void run(const std::function<void(int)>& body) {
    if (threads_ == 1) return body(0);
    body_ = &body;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    body(0);
    barrier();
  }

  void barrier() {
    if (threads_ == 1) return;
    unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      for (auto& each : shares_) each.next.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spins = 0; spins < SPINS; spins++) {
      if (round_.load(std::memory_order_acquire) != round) return;
      relax();
    }
    round_.wait(round, std::memory_order_acquire);  // another process has the core that a teammate needs: let it go
  }

  // Shares items 0 .. count-1 of a phase among the team, then meets. A thread takes neighbouring items one after another,
  // so that what it reads is a single stream, and when its share is done it takes the next items of others' shares.
  template <class Body>
  void share(int count, Body body) {
    if (threads_ == 1) {
      for (int i = 0; i < count; i++) body(i);
      return;
    }
    for (int n = 0; n < threads_; n++) {
      const int owner = (member + n) % threads_;
      const int first = int(int64_t(count) * owner / threads_), end = int(int64_t(count) * (owner + 1) / threads_);
      std::atomic<int>& next = shares_[owner].next;
      while (first + next.load(std::memory_order_relaxed) < end) {
        const int i = first + next.fetch_add(1, std::memory_order_relaxed);
        if (i < end) body(i);
      }
    }
    barrier();
  }

 private:
  struct alignas(64) Share {
    std::atomic<int> next{0};  // items of it that are taken
  };

  void work(int index) {
    member = index;
    unsigned seen = 0;
    while (true) {
      for (int spins = 0; spins < SPINS && epoch_.load(std::memory_order_acquire) == seen; spins++) relax();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
      }
      seen = epoch_.load();
      if (stopping_) return;
      (*body_)(index);
      barrier();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> epoch_{0};
  const std::function<void(int)>* body_ = nullptr;
  bool stopping_ = false;
  static inline thread_local int member = 0;  // number of this thread in its team
  std::vector<Share> shares_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace transect
