// A flat ragged batch over paged keys and values: the slots of its rows' keys, and the write of new keys.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace betoken {

// R rows of S sequences; see betoken.kernels.rows.PagedRows and TreePaths.
struct Rows {
  const int32_t *positions, *row_segments, *page_starts, *page_ids;
  int64_t num_rows, num_segments;
  const int32_t *path_starts, *path_slots;  // null: slot t holds position t throughout

  int64_t path_length(int64_t row) const { return path_starts ? path_starts[row + 1] - path_starts[row] : 0; }
  // Positions [fork, position] of a row are in path_slots[path_starts[row] ...], earlier ones in slots equal to their position.
  int64_t fork(int64_t row) const { return positions[row] + 1 - path_length(row); }
  int64_t own_slot(int64_t row) const { return path_length(row) ? path_slots[path_starts[row + 1] - 1] : positions[row]; }
};

template <class T>
struct Strided {
  T* data;  // [R, heads, size], size contiguous
  int64_t row_stride, head_stride;
  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

template <class T>
struct Attention {
  Strided<const T> query, key, value;  // key.data null: nothing to write
  Strided<T> out;
  T *key_cache, *value_cache;  // [pages, page_size, heads, size]
  Rows rows;
  int64_t page_size, num_heads, group, key_size, value_size;  // group: query heads per key head
  float scale, softcap;
  int64_t window, span;  // visible positions; positions are cut into spans, of which a row sees its own; 0: all
  const float* sinks;    // [query heads]; null: none
  const float* slopes;   // [query heads]; null: none

  const int32_t* pages(int64_t segment) const { return rows.page_ids + rows.page_starts[segment]; }
  // The slot of the pool that is slot `index` of the sequence with these pages.
  int64_t slot(const int32_t* pages, int64_t index) const {
    return int64_t(pages[index / page_size]) * page_size + index % page_size;
  }
};

template <class T>
bool is_finite(const T* x, int64_t size) {
  bool finite = true;
  for (int64_t i = 0; i < size; ++i) {
    const float value = to_float(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    finite &= (bits & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

// kv_write.kv_write
template <class T>
void write_rows(const Attention<T>& job) {
  for (int64_t row = 0; row < job.rows.num_rows; ++row) {
    const int32_t* pages = job.pages(job.rows.row_segments[row]);
    const int64_t first = job.slot(pages, job.rows.own_slot(row)) * job.num_heads;
    T* key = job.key_cache + first * job.key_size;
    T* value = job.value_cache + first * job.value_size;
    for (int64_t head = 0; head < job.num_heads; ++head) {
      std::memcpy(key + head * job.key_size, job.key.at(row, head), sizeof(T) * job.key_size);
      std::memcpy(value + head * job.value_size, job.value.at(row, head), sizeof(T) * job.value_size);
      if (is_finite(job.value.at(row, head), job.value_size)) continue;
      std::memset(key + head * job.key_size, 0xff, sizeof(T) * job.key_size);  // NaN
      std::memset(value + head * job.value_size, 0, sizeof(T) * job.value_size);
    }
  }
}

// The slots of positions [begin, end) of a sequence. No division per position.
template <class T>
void find_slots(const Attention<T>& job, const int32_t* pages, int64_t begin, int64_t end, int64_t* slots) {
  for (int64_t position = begin; position < end;) {
    int64_t slot = job.slot(pages, position);
    const int64_t stop = std::min(end, (position / job.page_size + 1) * job.page_size);
    for (; position < stop; ++position) *slots++ = slot++;
  }
}

// The same along the path of a row of a tree.
template <class T>
void find_path_slots(const Attention<T>& job, const int32_t* pages, int64_t row, int64_t begin, int64_t end,
                     int64_t* slots) {
  const int64_t fork = std::clamp(job.rows.fork(row), begin, end);
  const int64_t shift = job.rows.path_starts[row] - job.rows.fork(row);
  find_slots(job, pages, begin, fork, slots);
  for (int64_t position = fork; position < end; ++position)
    slots[position - begin] = job.slot(pages, job.rows.path_slots[shift + position]);
}

}  // namespace betoken
