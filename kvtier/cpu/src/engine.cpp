// Problems cut into tasks, the threads that run them, and the choice of an instruction set.
#include <pthread.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

#include "patience.h"
#include "phases.h"
#include "tasks.h"

char* Scratch::take(size_t bytes) {
  if (bytes > size) {
    memory.reset(new (std::nothrow) char[bytes + 64]);
    size = memory ? bytes : 0;
  }
  if (!memory) return nullptr;
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
}

namespace {

// ------------------------------------------------------------------------------------- instruction sets

const Kernel* kernel_named(const char* name) {
  if (!std::strcmp(name, "portable")) return portable_kernel();
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(name, "avx2") && avx2) return avx2_kernel();
  if (!std::strcmp(name, "avx512") && avx512) return avx512_kernel();
  if (!std::strcmp(name, "avx512_bf16") && avx512 && __builtin_cpu_supports("avx512bf16")) return avx512_bf16_kernel();
#endif
  return nullptr;
}

const Kernel* best_kernel() {
  for (const char* name : {"avx512_bf16", "avx512", "avx2"})
    if (const Kernel* kernel = kernel_named(name)) return kernel;
  return portable_kernel();
}

std::atomic<const Kernel*> chosen{nullptr};

const Kernel* kernel_in_use() {
  const Kernel* kernel = chosen.load(std::memory_order_acquire);
  if (!kernel) {
    kernel = best_kernel();
    chosen.store(kernel, std::memory_order_release);
  }
  return kernel;
}

// ------------------------------------------------------------------------------------- jobs

constexpr int64_t TASK_BYTES = 1 << 20;  // of keys and values: long enough to pay for its start
constexpr int64_t MOST_TASKS = 32;       // of one sequence: their results must be merged
constexpr int64_t ALONE = 256 << 10;     // bytes for which waking another thread does not pay

bool valid(const kvtier_problem& p) {
  const auto number = [](int32_t dtype) { return dtype == KVTIER_F32 || dtype == KVTIER_BF16 || dtype == KVTIER_F16; };
  if (!number(p.dtype) || !number(p.out_dtype)) return false;
  if (p.mask_dtype != KVTIER_NONE && p.mask_dtype != KVTIER_BOOL && !number(p.mask_dtype)) return false;
  if (p.mask_dtype != KVTIER_NONE && !p.mask) return false;
  if (p.sequences < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads) return false;
  if (p.queries < 1 || p.k_dim < 1 || p.v_dim < 1 || p.block_size < 1 || p.window < 0) return false;
  if (p.sequences == 0) return true;  // and there is nothing to point to
  if (!p.query || !p.out || !p.begins || !p.lengths) return false;
  for (int32_t s = 0; s < p.sequences; s++) {
    const int64_t blocks = p.begins[s + 1] - p.begins[s];
    if (blocks < 0 || (blocks && !p.blocks)) return false;
    if (!p.indices && blocks * p.block_size < p.lengths[s]) return false;
  }
  return true;
}

struct Job {
  kvtier_problem problem;
  const Kernel* kernel = nullptr;
  std::vector<Task> tasks;
  std::vector<size_t> first_task;  // [sequences + 1]
  std::vector<Partial> partials;   // [tasks]
  std::unique_ptr<std::atomic<int64_t>[]> left;  // tasks of each sequence that are not done
  size_t left_size = 0;
  Scratch memory;
  size_t scratch_bytes = 0;
  int64_t bytes = 0;  // of keys and values
  std::atomic<size_t> next{0}, done{0};
  Clock::time_point ended;  // when the last task was done
  std::atomic<int> error{KVTIER_OK};

  // Cut into tasks. Memory is kept from call to call.
  int begin(const kvtier_problem& p) {
    if (!valid(p)) return KVTIER_INVALID;
    problem = p;
    kernel = kernel_in_use();
    tasks.clear();
    first_task.clear();
    next = done = 0;
    error = KVTIER_OK;
    bytes = 0;
    const int64_t element = p.dtype == KVTIER_F32 ? 4 : 2;
    const int64_t block_bytes = static_cast<int64_t>(p.kv_heads) * p.block_size * (p.k_dim + p.v_dim) * element;
    const int64_t partial_bytes = static_cast<int64_t>(kernel->partial_floats(p)) * 4;
    int64_t longest = 0;
    for (int32_t s = 0; s < p.sequences; s++) {
      first_task.push_back(tasks.size());
      const int64_t begin = p.begins[s], blocks = p.begins[s + 1] - begin, total = blocks * block_bytes;
      bytes += total;
      int64_t count = std::min({total / TASK_BYTES, MOST_TASKS, total / (8 * partial_bytes), blocks});
      count = std::max<int64_t>(count, 1);
      for (int64_t i = 0; i < count; i++) {
        const Task task{s, begin + blocks * i / count, begin + blocks * (i + 1) / count};
        longest = std::max(longest, task.last - task.first);
        tasks.push_back(task);
      }
    }
    first_task.push_back(tasks.size());
    const size_t floats = (kernel->partial_floats(p) + 15) / 16 * 16;
    char* start = memory.take(tasks.size() * floats * 4);
    if (!start && !tasks.empty()) return KVTIER_MEMORY;
    partials.clear();
    for (size_t i = 0; i < tasks.size(); i++)
      partials.push_back(kernel->partial_at(p, reinterpret_cast<float*>(start) + i * floats));
    if (left_size < static_cast<size_t>(p.sequences)) {
      left.reset(new std::atomic<int64_t>[p.sequences]);
      left_size = static_cast<size_t>(p.sequences);
    }
    for (int32_t s = 0; s < p.sequences; s++)
      left[s].store(static_cast<int64_t>(first_task[s + 1] - first_task[s]), std::memory_order_relaxed);
    scratch_bytes = kernel->scratch_bytes(p, longest);
    return KVTIER_OK;
  }

  bool finished() const { return done.load(std::memory_order_acquire) == tasks.size(); }

  // Take tasks until there are none. Returns whether this call did the last one.
  bool run(Scratch& scratch) {
    char* here = scratch.take(scratch_bytes);
    bool last = false;
    for (;;) {
      const size_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks.size()) return last;
      const Task& task = tasks[i];
      if (here) {
        kernel->attend(problem, task, here, partials[i]);
        const int32_t s = task.sequence;
        if (left[s].fetch_sub(1, std::memory_order_acq_rel) == 1)
          kernel->finish(problem, s, &partials[first_task[s]], first_task[s + 1] - first_task[s]);
      } else {
        error = KVTIER_MEMORY;
      }
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks.size()) {
        ended = Clock::now();
        last = true;
      }
    }
  }
};

Scratch& own_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// ------------------------------------------------------------------------------------- threads

struct Entry {
  std::unique_ptr<Job> job;
  int helpers = 0;  // threads of the pool that may still join
  int inside = 0;   // threads at work on it
};

class Pool {
 public:
  // A job to fill, with the memory of an earlier one.
  std::unique_ptr<Job> fresh() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return std::make_unique<Job>();
    auto job = std::move(spare_.back());
    spare_.pop_back();
    return job;
  }

  void keep(std::unique_ptr<Job> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.size() < 4) spare_.push_back(std::move(job));
  }

  void add(Entry* entry, int threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      entry->helpers = threads;
      while (static_cast<int>(threads_.size()) < threads)
        threads_.emplace_back([this, mine = shut_downs_] { work(mine); });
      queue_.push_back(entry);
    }
    // Not under the lock, on which whoever wakes would only wait again.
    for (int i = 0; i < threads; i++) wake_.notify_one();
  }

  // Help with what is left of an entry, then wait for the others.
  void finish(Entry* entry) {
    entry->job->run(own_scratch());
    std::unique_lock<std::mutex> lock(mutex_);
    const auto it = std::find(queue_.begin(), queue_.end(), entry);
    if (it != queue_.end()) queue_.erase(it);
    left_.wait(lock, [&] { return entry->inside == 0 && entry->job->finished(); });
  }

  int threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(threads_.size());
  }

  void shut_down() {
    std::vector<std::thread> gone;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      shut_downs_++;
      gone.swap(threads_);
      spare_.clear();
    }
    wake_.notify_all();
    for (auto& thread : gone) thread.join();
  }

 private:
  // Until the pool is shut down once more; threads that are started meanwhile stay.
  void work(int mine) {
    Scratch scratch;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return shut_downs_ != mine || !queue_.empty(); });
      if (queue_.empty()) return;
      Entry* entry = queue_.front();
      entry->inside++;
      if (--entry->helpers == 0) queue_.pop_front();
      lock.unlock();
      entry->job->run(scratch);
      lock.lock();
      const auto it = std::find(queue_.begin(), queue_.end(), entry);
      if (it != queue_.end()) queue_.erase(it);
      if (--entry->inside == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Entry*> queue_;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Job>> spare_;
  int shut_downs_ = 0;
};

// GNU OpenMP's entry: runs f(data) on a team of threads, the caller's among them.
using Team = void (*)(void (*f)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<Team> team{nullptr};

Patience patience;

// Never destroyed: threads may still sleep in it when the process ends. Threads do not live on in a forked child: it
// begins with a new pool, and without GNU OpenMP, which would wait for those that it had for ever.
Pool* pool_ = nullptr;
std::once_flag pool_once;

Pool& pool() {
  std::call_once(pool_once, [] {
    pool_ = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
      pool_ = new Pool;
      team.store(nullptr);
    });
  });
  return *pool_;
}

int guarded(int (*f)(const kvtier_problem&, int32_t), const kvtier_problem& p, int32_t threads) {
  try {
    return f(p, threads);
  } catch (const std::exception&) {
    return KVTIER_MEMORY;
  }
}

int attend_now(const kvtier_problem& p, int32_t threads) {
  auto job = pool().fresh();
  int error = job->begin(p);
  if (!error) {
    const int useful = static_cast<int>(std::min<size_t>(job->tasks.size(), std::max(threads, 1)));
    const Team borrowed = team.load(std::memory_order_acquire);
    if (useful == 1 || job->bytes <= ALONE) {
      job->run(own_scratch());
    } else if (borrowed && !patience.lost()) {
      const auto began = Clock::now();
      borrowed([](void* data) { static_cast<Job*>(data)->run(own_scratch()); }, job.get(), static_cast<unsigned>(useful), 0);
      patience.observe(began, job->ended, Clock::now());
    } else {
      Entry entry;
      entry.job = std::move(job);
      pool().add(&entry, useful - 1);
      pool().finish(&entry);
      job = std::move(entry.job);
    }
    error = job->error;
  }
  pool().keep(std::move(job));
  return error;
}

}  // namespace

struct kvtier_job {
  Entry entry;
  Pool* owner = &pool();
  int error = KVTIER_OK;
};

extern "C" {

#ifndef KVTIER_SOURCE
#define KVTIER_SOURCE ""
#endif
const char* kvtier_source(void) { return KVTIER_SOURCE; }

const char* kvtier_instruction_set(void) { return kernel_in_use()->name; }

int kvtier_use_instruction_set(const char* name) {
  const Kernel* kernel = kernel_named(name);
  if (!kernel) return KVTIER_INVALID;
  chosen.store(kernel, std::memory_order_release);
  return KVTIER_OK;
}

void kvtier_use_team(void* entry) {
  pool();  // from now on a fork is noticed
  team.store(reinterpret_cast<Team>(entry), std::memory_order_release);
  patience.forget();
}

int kvtier_attend(const kvtier_problem* problem, int32_t threads) { return guarded(attend_now, *problem, threads); }

int kvtier_submit(const kvtier_problem* problem, int32_t threads, kvtier_job** job) {
  *job = nullptr;
  try {
    auto handle = std::make_unique<kvtier_job>();
    handle->entry.job = pool().fresh();
    handle->error = handle->entry.job->begin(*problem);
    if (!handle->error && !handle->entry.job->tasks.empty()) {
      const int useful = static_cast<int>(std::min<size_t>(handle->entry.job->tasks.size(), std::max(threads, 1)));
      pool().add(&handle->entry, useful);
    }
    *job = handle.release();
    return KVTIER_OK;
  } catch (const std::exception&) {
    return KVTIER_MEMORY;
  }
}

int kvtier_done(const kvtier_job* job) {
  return job->error || job->entry.job->finished() || job->owner != &pool();
}

int kvtier_wait(kvtier_job** job) {
  if (!*job) return KVTIER_OK;
  std::unique_ptr<kvtier_job> owned(*job);
  *job = nullptr;
  if (owned->owner != &pool()) {
    // From before a fork: the threads at work on it are not in this process. What they left locked stays as it is.
    const bool finished = !owned->error && owned->entry.job->finished();
    const int error = finished ? owned->entry.job->error.load() : KVTIER_CLOSED;
    owned.release();
    return error;
  }
  int error = owned->error;
  if (!error) {
    pool().finish(&owned->entry);
    error = owned->entry.job->error;
  }
  pool().keep(std::move(owned->entry.job));
  return error;
}

int32_t kvtier_threads(void) { return pool().threads(); }

void kvtier_shutdown(void) { pool().shut_down(); }

#ifdef KVTIER_PHASES
// Ticks of all threads since the last call: keys, softmax, values, and the rest of the tasks.
__attribute__((visibility("default"))) void kvtier_phases(uint64_t ticks[4]) {
  for (int i = 0; i < 4; i++) ticks[i] = phase_ticks[i].exchange(0, std::memory_order_relaxed);
}
#endif

}  // extern "C"
