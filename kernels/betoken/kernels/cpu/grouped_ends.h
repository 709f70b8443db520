// Scales and offsets of blocks of 16 or 32 k as floats, a chunk of K at a time.
#pragma once
#include "grouped.h"
#include "linear_grouped_job.h"

namespace betoken {

inline int dot_block(const GroupedFormat& format) { return format.group % 32 ? 16 : 32; }

// What ends a block of some k: its columns' scales, and offsets for an x of 1, as floats.
struct DotEnds {
  alignas(64) float scales[kDepthChunk / 16][kColumns], offsets[kDepthChunk / 16][kColumns];
};

// Of [from, end) of K. IS_RAW: offsets are the format's own numbers, zeros of codes included.
template <int BLOCK, bool IS_RAW = false>
inline void decode_ends(const GroupedColumns& columns, int64_t from, int64_t end, DotEnds& ends) {
  const GroupedFormat& format = columns.at.format;
  const Native factor = Native{} + format.factor();
  const int num_blocks = int((end - from) / BLOCK);
  // store(block, lane, its group) for all of them.
  auto each = [&](auto store) {
    int64_t group = from / format.group, left = format.group - from % format.group;
    for (int i = 0; i < num_blocks; ++i) {
      for (int lane = 0; lane < kColumns; lane += kNative) store(i, lane, group);
      if ((left -= BLOCK) == 0) ++group, left = format.group;
    }
  };
  with_number(format.scale, [&](auto kind) {
    each([&](int i, int lane, int64_t group) {
      store_native(ends.scales[i] + lane, columns.scale<decltype(kind)::value>(group, lane) * factor);
    });
  });
  with_number(format.offset, [&](auto kind) {
    if constexpr (kind != kNone)
      each([&](int i, int lane, int64_t group) {
        Native offset = columns.offset<decltype(kind)::value>(group, lane);
        if (is_zeros(kind) && !IS_RAW) offset = (Native{} - offset) * load_native(ends.scales[i] + lane);
        store_native(ends.offsets[i] + lane, offset);
      });
  });
}

// Prefetches a group's bytes and the next group's: evenly, one block at a time, in memory order.
struct DotAhead {
  const char* next;
  int64_t lines;  // a block

  DotAhead(const GroupedColumns& columns, int64_t num_blocks, int64_t codes) {
    const GroupedLayout& at = columns.at;
    lines = (at.bytes + num_blocks * 64 - 1) / (num_blocks * 64);
    // Codes are read behind the numbers of all blocks.
    next = reinterpret_cast<const char*>(columns.base) + std::min<int64_t>(at.codes_at, kMostAhead) + codes;
  }

  [[gnu::always_inline]] void ask() {
    for (int64_t line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 3);
  }

  static constexpr int64_t kMostAhead = 8192;
};

}  // namespace betoken
