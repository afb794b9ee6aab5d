// What the system has of a file in memory, its page cache, straight into blocks, with a checksum on the way.
//
// A file has the tokens of one head after those of another, and a block has some tokens of every head: the bytes of a
// tensor go to many places, in the order in which the file has them. They are read some at a time, so that they are in
// the processor's cache when their checksum is taken. Nothing waits for a disk: what is not in memory is not read.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "crc32.h"

namespace cached {

constexpr int PIECES = 256;                 // of one call of the system
constexpr size_t BYTES = size_t{128} << 10;  // from which on no further piece is added to a call

inline bool available() {
#if defined(RWF_NOWAIT)
  return crc32::available();
#else
  return false;
#endif
}

class Reader {
 public:
  explicit Reader(const kvtier_cached& from) : from_(from), at_(from.offset), read_(from.offset) {}

  int run() {
    for (int64_t head = 0; head < from_.heads; head++)
      for (int64_t i = 0; i < from_.piece_count; i++) {
        auto* to = static_cast<char*>(from_.pieces[i].address) + head * from_.head_stride;
        for (int64_t left = from_.pieces[i].nbytes; left > 0;) {
          const int64_t n = std::min(left, from_.segment - at_ % from_.segment);
          pieces_[count_++] = {to, static_cast<size_t>(n)};
          to += n, left -= n, at_ += n, bytes_ += static_cast<size_t>(n);
          if ((count_ == PIECES || bytes_ >= BYTES || at_ % from_.segment == 0) && !flush()) return KVTIER_ABSENT;
        }
      }
    return flush() ? KVTIER_OK : KVTIER_ABSENT;
  }

 private:
  bool flush() {
    if (!count_) return true;
#if defined(RWF_NOWAIT)
    if (preadv2(from_.file, pieces_, count_, read_, RWF_NOWAIT) != static_cast<ssize_t>(bytes_)) return false;
#else
    return false;
#endif
    for (int i = 0; i < count_; i++)
      *from_.crc = crc32::update(*from_.crc, static_cast<unsigned char*>(pieces_[i].iov_base),
                                 static_cast<int64_t>(pieces_[i].iov_len));
    read_ = at_, count_ = 0, bytes_ = 0;
    if (at_ % from_.segment == 0) *sums_++ = *from_.crc, *from_.crc = 0;
    return true;
  }

  const kvtier_cached& from_;
  int64_t at_, read_;  // in the file: the end of the pieces, and their beginning
  iovec pieces_[PIECES];
  int count_ = 0;
  size_t bytes_ = 0;
  uint32_t* sums_ = from_.sums;
};

}  // namespace cached
