// The library's own threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "job.h"

namespace {  // of one unit: instances of the standard library's templates over these types are not exported

// Scratch memory of a thread that is not the pool's.
inline Scratch& own_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// A job in the pool's queue.
struct Entry {
  Job* job = nullptr;
  int helpers = 0;  // threads of the pool that may still join
  int inside = 0;   // threads of the pool at work on it
};

class Pool {
 public:
  // A job to fill, with the memory of an earlier one.
  std::unique_ptr<Job> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return std::make_unique<Job>();
    auto job = std::move(spare_.back());
    spare_.pop_back();
    return job;
  }

  void give_back(std::unique_ptr<Job> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.size() < 4) spare_.push_back(std::move(job));
  }

  // Queue an entry for so many threads, or those that the system lets it have. False, and nothing done, where there are
  // none, or once the pool is drained.
  bool add(Entry* entry, int threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (drained_) return false;
      try {
        while (static_cast<int>(threads_.size()) < threads)
          threads_.emplace_back([this, mine = shutdowns_] { work(mine); });
      } catch (const std::system_error&) {  // no more of them now
        if (threads_.empty()) return false;
        threads = static_cast<int>(threads_.size());
      }
      entry->helpers = threads;
      queue_.push_back(entry);
    }
    // Not under the lock: a thread that wakes up would only wait for it.
    for (int i = 0; i < threads; i++) wake_.notify_one();
    return true;
  }

  // Help with what is left of an entry, then wait for the others.
  void finish(Entry* entry) {
    entry->job->run(own_scratch());
    std::unique_lock<std::mutex> lock(mutex_);
    remove(entry);
    left_.wait(lock, [&] { return entry->inside == 0 && entry->job->finished(); });
  }

  // Refuse further entries, and wait until the pool's threads have finished those that are queued.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    drained_ = true;
    left_.wait(lock, [&] { return queue_.empty() && working_ == 0; });
  }

  int threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(threads_.size());
  }

  void shut_down() {
    std::vector<std::thread> ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shutdowns_++;
      ended.swap(threads_);
      spare_.clear();
    }
    wake_.notify_all();
    for (auto& thread : ended) thread.join();
  }

 private:
  // Until the pool is shut down once more; threads that are started meanwhile stay.
  void work(int mine) {
    Scratch scratch;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return shutdowns_ != mine || !queue_.empty(); });
      if (queue_.empty()) return;
      Entry* entry = queue_.front();
      entry->inside++;
      working_++;
      if (--entry->helpers == 0) queue_.pop_front();
      lock.unlock();
      entry->job->run(scratch);
      lock.lock();
      remove(entry);
      working_--;
      if (--entry->inside == 0) left_.notify_all();
    }
  }

  // No thread needs to join an entry whose tasks are all taken.
  void remove(Entry* entry) {
    const auto it = std::find(queue_.begin(), queue_.end(), entry);
    if (it == queue_.end()) return;
    queue_.erase(it);
    if (queue_.empty()) left_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Entry*> queue_;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Job>> spare_;
  int working_ = 0;  // threads of the pool at work
  int shutdowns_ = 0;
  bool drained_ = false;
};

}  // namespace
