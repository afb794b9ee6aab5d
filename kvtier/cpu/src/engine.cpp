// The C interface: the choice of an instruction set, and who runs the tasks of a call.
#include <pthread.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>
#include <new>

#include "append.h"
#include "cached.h"
#include "crc32.h"
#include "phases.h"
#include "pool.h"

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

#if defined(__x86_64__)
// Whether the CPU has AMX for bf16, and the kernel lets this process use it: a thread that was not allowed to is killed.
bool tiles_allowed() {
#ifdef KVTIER_EMULATED_TILES
  return true;
#else
  static const bool allowed = [] {
    constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILES)) != (BF16 | TILES)) return false;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return allowed;
#endif
}
#endif

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
  if (!std::strcmp(name, "amx_bf16") && avx512 && __builtin_cpu_supports("avx512bf16") && tiles_allowed())
    return amx_bf16_kernel();
#elif defined(__aarch64__)
  if (!std::strcmp(name, "neon")) return neon_kernel();  // every such CPU has it
#endif
  return nullptr;
}

const Kernel* best_kernel() {
  for (const char* name : {"amx_bf16", "avx512_bf16", "avx512", "avx2", "neon"}) {
#if defined(__x86_64__)
    // Emerald Rapids multiplies half as many pairs a cycle as numbers of fp32; others of Intel's were not timed. See
    // docs/design/host-attention.md.
    if (!std::strcmp(name, "avx512_bf16") && __builtin_cpu_is("intel")) continue;
#endif
    if (const Kernel* kernel = kernel_named(name)) return kernel;
  }
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

// ------------------------------------------------------------------------------------- threads

constexpr int64_t SMALL = 256 << 10;  // bytes up to which waking another thread does not pay

// GOMP_parallel: runs f(data) on a team of threads, the caller's among them.
using Team = void (*)(void (*f)(void*), void* data, unsigned threads, unsigned flags);
std::atomic<Team> team{nullptr};

Backoff backoff;

// Never destroyed: threads may still sleep in it when the process ends. A forked child has no copy of the threads: it
// begins with a new pool, and without the borrowed team, which might wait forever for the threads that it had.
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

int attend_now(const kvtier_problem& p, int32_t threads) {
  thread_local Job job;
  if (const int error = job.begin(p, kernel_in_use())) return error;
  const int useful = static_cast<int>(std::min<size_t>(job.tasks(), static_cast<size_t>(std::max(threads, 1))));
  const Team borrowed = team.load(std::memory_order_acquire);
  if (useful <= 1 || job.bytes() <= SMALL) {
    job.run(own_scratch());
  } else if (borrowed && !backoff.active()) {
    const auto began = Clock::now();
    borrowed([](void* data) { static_cast<Job*>(data)->run(own_scratch()); }, &job, static_cast<unsigned>(useful), 0);
    backoff.observe(began, job.ended(), Clock::now());
  } else {
    Entry entry;
    entry.job = &job;
    pool().add(&entry, useful - 1);  // once the pool is drained, this thread runs all tasks
    pool().finish(&entry);
  }
  return job.error();
}

}  // namespace

struct kvtier_job {
  std::unique_ptr<Job> job;
  Entry entry;
  Pool* owner = &pool();
  int error = KVTIER_OK;

  bool finished() const { return error || job->finished(); }
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

int kvtier_use_prefetch(const char* name) {
  for (const auto& [known, way] : {std::pair{"software", static_cast<int32_t>(Prefetch::software)},
                                   std::pair{"hardware", static_cast<int32_t>(Prefetch::hardware)},
                                   std::pair{"learned", LEARNED}})
    if (!std::strcmp(name, known)) {
      asked_prefetch.store(way, std::memory_order_relaxed);
      return KVTIER_OK;
    }
  return KVTIER_INVALID;
}

void kvtier_use_team(void* entry) {
  pool();  // registers the fork handler, which drops the team
  team.store(reinterpret_cast<Team>(entry), std::memory_order_release);
  backoff.reset();
}

int kvtier_attend(const kvtier_problem* problem, int32_t threads) {
  try {
    return attend_now(*problem, threads);
  } catch (const std::exception&) {
    return KVTIER_MEMORY;
  }
}

int kvtier_submit(const kvtier_problem* problem, int32_t threads, kvtier_job** job) {
  *job = nullptr;
  try {
    auto handle = std::make_unique<kvtier_job>();
    handle->job = pool().take();
    handle->entry.job = handle->job.get();
    handle->error = handle->job->begin(*problem, kernel_in_use());
    if (!handle->error && handle->job->tasks()) {
      const size_t useful = std::min(handle->job->tasks(), static_cast<size_t>(std::max(threads, 1)));
      if (!pool().add(&handle->entry, static_cast<int>(useful))) handle->job->run(own_scratch());
    }
    *job = handle.release();
    return KVTIER_OK;
  } catch (const std::exception&) {
    return KVTIER_MEMORY;
  }
}

int kvtier_done(const kvtier_job* job) { return job->finished() || job->owner != &pool(); }

int kvtier_wait(kvtier_job** job, double* seconds) {
  if (!*job) return KVTIER_OK;
  std::unique_ptr<kvtier_job> owned(*job);
  *job = nullptr;
  int error = owned->error;
  if (!error && owned->owner != &pool()) {
    // From before a fork. The threads that work on it are not in this process, and what they locked stays locked.
    error = owned->job->finished() ? owned->job->error() : KVTIER_CLOSED;
    if (seconds && !error) *seconds = owned->job->seconds();
    owned.release();
    return error;
  }
  if (!error) {
    pool().finish(&owned->entry);
    error = owned->job->error();
    if (seconds) *seconds = owned->job->seconds();
  }
  pool().give_back(std::move(owned->job));
  return error;
}

int32_t kvtier_threads(void) { return pool().threads(); }

void kvtier_shutdown(void) { pool().shut_down(); }

void kvtier_drain(void) { pool().drain(); }

int kvtier_append(const kvtier_append_problem* problem) {
  for (int64_t i = 0; i < problem->span_count; i++)
    if (!append::fits(*problem, problem->spans[i])) return KVTIER_INVALID;
  for (int64_t i = 0; i < problem->span_count; i++) append::copy(*problem, problem->spans[i]);
  return KVTIER_OK;
}

int kvtier_merge(const kvtier_merge_problem* problem) {
  if (problem->part_count < 1 || problem->dim < 0) return KVTIER_INVALID;
  if (problem->out_dtype < KVTIER_F32 || problem->out_dtype > KVTIER_F16) return KVTIER_INVALID;
  kernel_in_use()->merge(*problem);
  return KVTIER_OK;
}

int kvtier_checksums(const void* data, int64_t blocks, int64_t nbytes, uint64_t seed, uint64_t* sums) {
  if (nbytes < 0 || nbytes % 8) return KVTIER_INVALID;
  const auto checksum = kernel_in_use()->checksum;
  const auto* words = static_cast<const uint64_t*>(data);
  for (int64_t i = 0; i < blocks; i++) sums[i] = checksum(words + i * (nbytes / 8), nbytes / 8, seed);
  return KVTIER_OK;
}

int kvtier_crc32(const void* data, int64_t nbytes, uint32_t* crc) {
  static const bool available = crc32::available();
  if (nbytes < 0 || !available) return KVTIER_INVALID;
  *crc = crc32::update(*crc, static_cast<const unsigned char*>(data), nbytes);
  return KVTIER_OK;
}

int kvtier_read_cached(const kvtier_cached* from) {
  static const bool available = cached::available();
  if (!available || from->segment <= 0) return KVTIER_INVALID;
  return cached::Reader(*from).run();
}

#ifdef KVTIER_PHASES
// Ticks of all threads since the last call: keys, softmax, values, and the rest of the tasks.
__attribute__((visibility("default"))) void kvtier_phases(uint64_t ticks[4]) {
  for (int i = 0; i < 4; i++) ticks[i] = phase_ticks[i].exchange(0, std::memory_order_relaxed);
}
#endif

}  // extern "C"
