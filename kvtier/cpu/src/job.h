// A problem, checked and cut into tasks, and what its threads share while they run them.
#pragma once

#include <algorithm>

#include "backoff.h"
#include "tasks.h"

constexpr int64_t TASK_BYTES = 1 << 20;  // of keys and values: enough work to pay for a task's start
constexpr int64_t MOST_TASKS = 32;       // of one sequence: their results must be combined

// Nothing in here throws but std::bad_alloc.
class Job {
 public:
  // Check a problem and cut it. Memory is kept from call to call.
  int begin(const kvtier_problem& p, const Kernel* kernel) {
    if (!valid(p)) return KVTIER_INVALID;
    problem_ = p;
    kernel_ = kernel;
    sequences_.clear();
    runs_.clear();
    tasks_.clear();
    next_ = done_ = 0;
    error_ = KVTIER_OK;
    bytes_ = 0;
    began_ = ended_ = {};
    // Tasks point to runs: copy all runs first.
    int64_t most_runs = 0;
    for (int32_t s = 0; s < p.sequence_count; s++) most_runs += p.sequences[s].run_count;
    if (static_cast<size_t>(most_runs) > runs_.capacity()) runs_.reserve(static_cast<size_t>(most_runs));
    size_t floats = 0;
    scratch_bytes_ = 0;
    for (int32_t s = 0; s < p.sequence_count; s++)
      if (p.queries[s].count && !add(s, floats)) return KVTIER_INVALID;
    char* start = memory_.take(floats * 4);
    if (!start && floats) return KVTIER_MEMORY;
    assign(reinterpret_cast<float*>(start));
    return KVTIER_OK;
  }

  // Take tasks until there are none.
  void run(Scratch& scratch) {
    char* memory = scratch.take(scratch_bytes_);
    for (;;) {
      const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks_.size()) return;
      if (i == 0) began_ = Clock::now();
      const Task& task = tasks_[i];
      const Sequence& sequence = sequences_[static_cast<size_t>(task.sequence)];
      if (memory) {
        kernel_->attend(problem_, sequence, task, memory, partials_[i]);
        if (left_[task.sequence].fetch_sub(1, std::memory_order_acq_rel) == 1)
          kernel_->finish(problem_, sequence, &partials_[sequence.first_task], sequence.task_count);
      } else {
        error_ = KVTIER_MEMORY;
      }
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks_.size()) ended_ = Clock::now();
    }
  }

  size_t tasks() const { return tasks_.size(); }
  int64_t bytes() const { return bytes_; }  // of the keys and values that are read
  bool finished() const { return done_.load(std::memory_order_acquire) == tasks_.size(); }
  int error() const { return error_; }
  Clock::time_point began() const { return began_; }
  Clock::time_point ended() const { return ended_; }
  double seconds() const { return std::chrono::duration<double>(ended_ - began_).count(); }

 private:
  static bool valid(const kvtier_problem& p) {
    const auto number = [](int32_t x) { return x == KVTIER_F32 || x == KVTIER_BF16 || x == KVTIER_F16; };
    if (!number(p.dtype) || !number(p.out_dtype)) return false;
    if (p.mask_dtype != KVTIER_NONE && p.mask_dtype != KVTIER_BOOL && !number(p.mask_dtype)) return false;
    if (p.sequence_count < 0 || p.kv_heads < 1 || p.heads < p.kv_heads || p.heads % p.kv_heads) return false;
    if (p.k_dim < 1 || p.v_dim < 1 || p.block_size < 1 || p.window < 0) return false;
    if (p.sequence_count && (!p.sequences || !p.queries)) return false;
    for (int32_t s = 0; s < p.sequence_count; s++) {
      const kvtier_sequence& sequence = p.sequences[s];
      if (sequence.run_count < 0 || sequence.length < 0 || (sequence.run_count && !sequence.runs)) return false;
      const int64_t rows = p.queries[s].count;
      if (rows < 0 || rows > INT32_MAX / p.heads) return false;
      if (rows && (!p.query || !p.out || (p.mask_dtype != KVTIER_NONE && !p.mask))) return false;
    }
    return true;
  }

  // Copy sequence s and the runs that its queries see, and cut it. Adds the floats that its partials need.
  bool add(int32_t s, size_t& floats) {
    const kvtier_problem& p = problem_;
    const kvtier_sequence& from = p.sequences[s];
    const kvtier_queries& rows = p.queries[s];
    Sequence to{};
    to.row = s;
    to.queries = static_cast<int32_t>(rows.count);
    to.length = from.length;
    to.query = rows.query;
    to.out = rows.out;
    to.lse = rows.lse;
    to.first_seen = p.first_valid ? std::max<int64_t>(p.first_valid[s], 0) : 0;
    to.lowest = to.first_seen;
    if (p.window > 0) to.lowest = std::max<int64_t>(to.lowest, to.length - to.queries - p.window + 1);

    const int64_t low = to.lowest / p.block_size, high = (to.length + p.block_size - 1) / p.block_size;
    const kvtier_run* const end = from.runs + from.run_count;
    const kvtier_run* run = std::partition_point(from.runs, end, [low](const kvtier_run& r) {
      return static_cast<int64_t>(r.index) + r.count <= low;
    });
    const size_t first_run = runs_.size();
    int64_t blocks = 0, before = 0;  // blocks: seen so far; before: end of the last run
    for (; run != end && run->index < high; run++) {
      const int64_t stop = static_cast<int64_t>(run->index) + run->count;
      if (run->count < 1 || run->index < before || stop > INT32_MAX) return false;
      before = stop;
      const int64_t index = std::max<int64_t>(run->index, low), count = std::min(stop, high) - index;
      runs_.push_back({run->address + (index - run->index) * p.block_stride, static_cast<int32_t>(index),
                       static_cast<int32_t>(count)});
      blocks += count;
    }

    const int64_t element = p.dtype == KVTIER_F32 ? 4 : 2;
    const int64_t total = blocks * p.kv_heads * p.block_size * (p.k_dim + p.v_dim) * element;
    bytes_ += total;
    const size_t partial = (kernel_->partial_floats(p, to.queries) + 15) / 16 * 16;
    const int64_t partial_bytes = static_cast<int64_t>(partial) * 4;
    const int64_t count = std::min({total / TASK_BYTES, MOST_TASKS, total / (8 * partial_bytes), blocks});
    to.first_task = tasks_.size();
    to.task_count = static_cast<size_t>(std::max<int64_t>(count, 1));
    cut(static_cast<int32_t>(sequences_.size()), runs_.data() + first_run, blocks, static_cast<int64_t>(to.task_count));
    floats += to.task_count * partial;
    scratch_bytes_ = std::max(scratch_bytes_, kernel_->scratch_bytes(p, to.queries));
    sequences_.push_back(to);
    return true;
  }

  // One pass over the runs finds where each of `count` tasks begins.
  void cut(int32_t sequence, const kvtier_run* run, int64_t blocks, int64_t count) {
    int64_t at = 0, passed = 0;  // blocks before this task, blocks before this run
    for (int64_t i = 0; i < count; i++) {
      const int64_t next = blocks * (i + 1) / count;
      while (at < next && at - passed >= run->count) passed += run++->count;
      tasks_.push_back({sequence, run, at - passed, next - at});
      at = next;
    }
  }

  void assign(float* memory) {
    if (left_size_ < sequences_.size()) {
      left_.reset(new std::atomic<int64_t>[sequences_.size()]);
      left_size_ = sequences_.size();
    }
    partials_.clear();
    for (size_t s = 0; s < sequences_.size(); s++) {
      const Sequence& sequence = sequences_[s];
      left_[s].store(static_cast<int64_t>(sequence.task_count), std::memory_order_relaxed);
      const size_t floats = (kernel_->partial_floats(problem_, sequence.queries) + 15) / 16 * 16;
      for (size_t i = 0; i < sequence.task_count; i++, memory += floats)
        partials_.push_back(kernel_->partial_at(problem_, sequence.queries, memory));
    }
  }

  kvtier_problem problem_;
  const Kernel* kernel_ = nullptr;
  std::vector<Sequence> sequences_;  // those with queries
  std::vector<kvtier_run> runs_;     // of all sequences, only blocks that are seen
  std::vector<Task> tasks_;
  std::vector<Partial> partials_;                 // [tasks]
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // tasks of each sequence that are not done
  size_t left_size_ = 0;
  Scratch memory_;
  size_t scratch_bytes_ = 0;
  int64_t bytes_ = 0;
  std::atomic<size_t> next_{0}, done_{0};
  Clock::time_point began_, ended_;  // of the first and the last task
  std::atomic<int> error_{KVTIER_OK};
};
