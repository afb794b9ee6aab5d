// A problem, checked and cut into tasks, and what its threads share while they run them.
#pragma once

#include <algorithm>

#include "backoff.h"
#include "tasks.h"

constexpr int64_t TASK_BYTES = 1 << 20;  // of keys and values, about: enough work to pay for a task's start
// From here on there are two: half of it takes longer than a second thread takes to start.
constexpr int64_t TWO_TASKS = TASK_BYTES / 2;
constexpr int64_t MOST_TASKS = 32;  // over the blocks of one sequence: their results must be combined
// Rows (head, query) of a KV head. From so many on arithmetic is the limit, and each KV head is a share of its own; so
// are about so many rows, over which packing keys and values is spread, and whose sums stay in the L2 cache.
constexpr int64_t ROWS_OF_A_HEAD = 32, ROWS_OF_A_SHARE = 256;

// How keys and values are prefetched: a `Prefetch`, or what is learned.
constexpr int32_t LEARNED = -1;
inline std::atomic<int32_t> asked_prefetch{LEARNED};

// Nothing in here throws but std::bad_alloc.
class Job {
 public:
  // Check a problem and cut it. Memory is kept from call to call.
  int begin(const kvtier_problem& p, const Kernel* kernel) {
    if (!valid(p)) return KVTIER_INVALID;
    problem_ = p;
    kernel_ = kernel;
    shares_.clear();
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
    scratch_bytes_ = own_partial_bytes_ = 0;
    for (int32_t s = 0; s < p.sequence_count; s++)
      if (p.queries[s].count && !add(s, floats)) return KVTIER_INVALID;
    char* start = memory_.take(floats * 4);
    if (!start && floats) return KVTIER_MEMORY;
    assign(reinterpret_cast<float*>(start));
    return KVTIER_OK;
  }

  // Take tasks until there are none.
  void run(Scratch& scratch) {
    char* memory = scratch.take(scratch_bytes_ + own_partial_bytes_);
    for (;;) {
      const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks_.size()) return;
      if (i == 0) began_ = Clock::now();
      const Task& task = tasks_[i];
      const Share& share = shares_[static_cast<size_t>(task.share)];
      if (memory && share.task_count == 1) {
        const Partial own = kernel_->partial_at(problem_, share, reinterpret_cast<float*>(memory + scratch_bytes_));
        attend(share, task, memory, own);
        kernel_->finish(problem_, share, &own, 1);
      } else if (memory) {
        attend(share, task, memory, partials_[i]);
        if (left_[task.share].fetch_sub(1, std::memory_order_acq_rel) == 1)
          kernel_->finish(problem_, share, &partials_[share.first_task], share.task_count);
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
  // Prefetches in the way that is faster here, and learns which one that is.
  void attend(const Share& share, const Task& task, char* memory, Partial out) {
    const int32_t asked = asked_prefetch.load(std::memory_order_relaxed);
    if (asked != LEARNED || share.group_rows() >= ROWS_OF_A_HEAD) {  // so many are computed longer than they are read
      const Prefetch way = asked == LEARNED ? Prefetch::software : static_cast<Prefetch>(asked);
      kernel_->attend(problem_, share, task, way, memory, out);
      return;
    }
    thread_local Trials<Clock> own[CONTESTS];
    const int which = contest_of(problem_.dtype, share.group_rows());
    Contest& contest = kernel_->contests[which];
    const Prefetch way = own[which].begin(contest);
    const int64_t tokens = kernel_->attend(problem_, share, task, way, memory, out);
    own[which].end(contest, tokens * share.kv_heads * (int64_t{problem_.k_dim} + problem_.v_dim));
  }

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

  // Copy the runs that the queries of sequence s see, share them out and cut them. Adds the floats that partials need.
  bool add(int32_t s, size_t& floats) {
    const kvtier_problem& p = problem_;
    const kvtier_sequence& from = p.sequences[s];
    const kvtier_queries& rows = p.queries[s];
    Share all{};
    all.row = s;
    all.kv_heads = p.kv_heads;
    all.query_heads = p.heads;
    all.queries = static_cast<int32_t>(rows.count);
    all.position = from.length - rows.count;
    all.length = from.length;
    all.query = rows.query;
    all.out = rows.out;
    all.lse = rows.lse;
    all.first_seen = p.first_valid ? std::max<int64_t>(p.first_valid[s], 0) : 0;
    all.lowest = lowest(all);

    const int64_t low = all.lowest / p.block_size, high = (all.length + p.block_size - 1) / p.block_size;
    const kvtier_run* const end = from.runs + from.run_count;
    const kvtier_run* run = std::partition_point(from.runs, end, [low](const kvtier_run& r) {
      return static_cast<int64_t>(r.index) + r.count <= low;
    });
    const size_t first_run = runs_.size();
    int64_t before = 0, blocks = 0;  // the end of the last run, and of all runs
    for (; run != end && run->index < high; run++) {
      const int64_t stop = static_cast<int64_t>(run->index) + run->count;
      if (run->count < 1 || run->index < before || stop > INT32_MAX) return false;
      before = stop;
      const int64_t index = std::max<int64_t>(run->index, low), count = std::min(stop, high) - index;
      blocks += std::max<int64_t>(count, 0);
      if (count > 0)
        runs_.push_back({run->address + (index - run->index) * p.block_stride, static_cast<int32_t>(index),
                         static_cast<int32_t>(count)});
    }

    // Where there are many queries, their number is what threads share; each then works on one KV head. Else halves of the
    // heads are shares, or quarters and less where blocks are few and large: two threads have as much to do, and read what
    // is contiguous.
    const bool many = all.group_rows() >= ROWS_OF_A_HEAD;
    const int64_t bytes = bytes_of(blocks, p.kv_heads);
    const int64_t tasks = std::min(bytes / TASK_BYTES, MOST_TASKS);
    int64_t heads = many ? p.kv_heads : 1;
    if (!many && bytes >= TWO_TASKS)
      while (p.kv_heads % (2 * heads) == 0 && (heads == 1 || heads * blocks < tasks)) heads *= 2;
    const int64_t parts = std::clamp<int64_t>((all.group_rows() + ROWS_OF_A_SHARE / 2) / ROWS_OF_A_SHARE, 1, all.queries);
    for (int32_t g = 0; g < heads; g++)
      for (int64_t i = 0; i < parts; i++) {
        Share part = all;
        const int64_t first = all.queries * i / parts;
        part.kv_heads = static_cast<int32_t>(p.kv_heads / heads);
        part.kv_head = g * part.kv_heads;
        part.query_heads = static_cast<int32_t>(p.heads / heads);
        part.first_query = static_cast<int32_t>(first);
        part.queries = static_cast<int32_t>(all.queries * (i + 1) / parts - first);
        part.position += first;
        if (p.causal) part.length = std::min(part.length, part.position + part.queries);
        part.query += first * p.query_strides[1];
        part.out += first * p.out_strides[1];
        part.lse += first * p.lse_strides[1];
        part.lowest = lowest(part);
        cut(part, first_run, heads * parts, floats);
      }
    return true;
  }

  // The first position that any query of a share sees.
  int64_t lowest(const Share& share) const {
    const int64_t window = problem_.window;
    return window > 0 ? std::max(share.first_seen, share.position - window + 1) : share.first_seen;
  }

  int64_t bytes_of(int64_t blocks, int64_t kv_heads) const {
    const kvtier_problem& p = problem_;
    return blocks * kv_heads * p.block_size * (p.k_dim + p.v_dim) * (p.dtype == KVTIER_F32 ? 4 : 2);
  }

  // Cut a share, one of so many that its sequence has, into tasks of whole blocks: the sequence's runs begin there. Adds the
  // floats that its partials need.
  void cut(Share& share, size_t first_run, int64_t shares, size_t& floats) {
    const kvtier_problem& p = problem_;
    const int64_t low = share.lowest / p.block_size, high = (share.length + p.block_size - 1) / p.block_size;
    const kvtier_run *run = runs_.data() + first_run, *const end = runs_.data() + runs_.size();
    while (run != end && static_cast<int64_t>(run->index) + run->count <= low) run++;
    int64_t skip = run == end ? 0 : std::max<int64_t>(low - run->index, 0), blocks = -skip;
    for (const kvtier_run* r = run; r != end && r->index < high; r++)
      blocks += std::min<int64_t>(r->count, high - r->index);
    blocks = std::max<int64_t>(blocks, 0);  // none is listed

    const int64_t total = bytes_of(blocks, share.kv_heads);
    bytes_ += total;
    const size_t partial = (kernel_->partial_floats(p, share) + 15) / 16 * 16;
    const int64_t partial_bytes = static_cast<int64_t>(partial) * 4;
    // An even number, or one of two threads waits for the other's last task: of all shares of the heads, else of each.
    const int64_t even = total < TWO_TASKS ? 1 : std::max<int64_t>((total / TASK_BYTES + 1) / 2 * 2, 2);
    const bool few = share.group_rows() < ROWS_OF_A_HEAD && shares % 2 == 0;
    const int64_t enough = few ? (total + TASK_BYTES / 2) / TASK_BYTES : even;
    const int64_t count =
        std::max<int64_t>(std::min({enough, MOST_TASKS / shares, total / (8 * partial_bytes), blocks}), 1);
    share.first_task = tasks_.size();
    share.task_count = static_cast<size_t>(count);
    // One pass over the runs finds where each task begins. No task is larger than the first, none smaller than the last.
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
      const int64_t next = (blocks * (i + 1) + count - 1) / count;
      tasks_.push_back({static_cast<int32_t>(shares_.size()), run, skip, next - at});
      for (skip += next - at; run != end && skip >= run->count; run++) skip -= run->count;
      at = next;
    }
    scratch_bytes_ = std::max(scratch_bytes_, (kernel_->scratch_bytes(p, share) + 63) / 64 * 64);
    if (count == 1) own_partial_bytes_ = std::max(own_partial_bytes_, static_cast<size_t>(partial_bytes));
    else floats += share.task_count * partial;
    shares_.push_back(share);
  }

  void assign(float* memory) {
    if (left_size_ < shares_.size()) {
      left_.reset(new std::atomic<int64_t>[shares_.size()]);
      left_size_ = shares_.size();
    }
    partials_.assign(tasks_.size(), {});
    for (size_t s = 0; s < shares_.size(); s++) {
      const Share& share = shares_[s];
      if (share.task_count == 1) continue;  // in the scratch memory of its thread
      left_[s].store(static_cast<int64_t>(share.task_count), std::memory_order_relaxed);
      const size_t floats = (kernel_->partial_floats(problem_, share) + 15) / 16 * 16;
      for (size_t i = 0; i < share.task_count; i++, memory += floats)
        partials_[share.first_task + i] = kernel_->partial_at(problem_, share, memory);
    }
  }

  kvtier_problem problem_;
  const Kernel* kernel_ = nullptr;
  std::vector<Share> shares_;        // of the sequences that have queries
  std::vector<kvtier_run> runs_;     // of all sequences, only blocks that are seen
  std::vector<Task> tasks_;
  std::vector<Partial> partials_;                 // [tasks], of shares with more than one
  std::unique_ptr<std::atomic<int64_t>[]> left_;  // tasks of such a share that are not done
  size_t left_size_ = 0;
  Scratch memory_;
  size_t scratch_bytes_ = 0, own_partial_bytes_ = 0;  // of a thread: what the kernel needs, and a share's partial
  int64_t bytes_ = 0;
  std::atomic<size_t> next_{0}, done_{0};
  Clock::time_point began_, ended_;  // of the first and the last task
  std::atomic<int> error_{KVTIER_OK};
};
