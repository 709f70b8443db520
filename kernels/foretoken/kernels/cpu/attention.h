// Paged causal attention of a flat ragged batch, and the write of its new keys and values.
//
// Sixteen queries (row, head) of one sequence and key head share a pass over the keys: lane i of every vector is query
// i, so no query can change another's bits. Keys are reduced in chunks of 256 absolute positions, in order, in float32.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace foretoken {

constexpr int kChunk = 256;

// R rows of S sequences; see foretoken.kernels.rows.PagedRows.
struct Rows {
  const int32_t *positions, *row_segments, *page_starts, *page_ids;
  int64_t num_rows, num_segments;
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
  int64_t window;

  const T* slot(const T* cache, int64_t size, const int32_t* pages, int64_t position, int64_t head) const {
    return cache + ((int64_t(pages[position / page_size]) * page_size + position % page_size) * num_heads + head) * size;
  }
};

template <class T>
void write_rows(const Attention<T>& job) {
  for (int64_t row = 0; row < job.rows.num_rows; ++row) {
    const int32_t* pages = job.rows.page_ids + job.rows.page_starts[job.rows.row_segments[row]];
    const int64_t position = job.rows.positions[row];
    T* key = const_cast<T*>(job.slot(job.key_cache, job.key_size, pages, position, 0));
    T* value = const_cast<T*>(job.slot(job.value_cache, job.value_size, pages, position, 0));
    for (int64_t head = 0; head < job.num_heads; ++head) {
      std::memcpy(key + head * job.key_size, job.key.at(row, head), sizeof(T) * job.key_size);
      std::memcpy(value + head * job.value_size, job.value.at(row, head), sizeof(T) * job.value_size);
    }
  }
}

// Up to 16 queries of rows [first_row, ...) of one sequence and one key head.
struct Block {
  int32_t segment, first_row, first_query, num_queries;  // query i: row first_row + (first_query + i) / group
};

// Per-thread memory of one block.
struct Scratch {
  std::vector<float> query;    // [key_size][16], scaled by nothing
  std::vector<uint16_t> pairs; // [key_size / 2][16][2] bf16
  std::vector<float> floats;   // one key or the chunk's values as floats
  std::vector<float> sums;     // [16][value_size rounded up]
  alignas(64) float scores[kChunk][kLanes];
};

#if defined(__AMX_BF16__)
// scores[16 keys][16 queries] of one aligned run of 16 slots.
inline void scores_tiles(const bf16* keys, int64_t stride_bytes, const uint16_t* pairs, int64_t size, float* scores) {
  _tile_zero(0);
  for (int64_t d = 0; d < size; d += 32) {
    _tile_loadd(1, keys + d, int(stride_bytes));
    _tile_loadd(2, pairs + d / 2 * 32, 64);
    _tile_dpbf16ps(0, 1, 2);
  }
  _tile_stored(0, scores, 64);
}

inline void configure_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}
#endif

template <class T>
bool use_tiles(const Attention<T>& job) {
  return sizeof(T) == 2 && has_tiles() && job.page_size % 16 == 0 && job.key_size % 32 == 0;
}

// Scores of positions [begin, end) of a chunk that starts at `origin`; raw products, neither scaled nor masked.
template <class T>
void chunk_scores(const Attention<T>& job, const int32_t* pages, int64_t head, int64_t origin, int64_t begin,
                  int64_t end, Scratch& scratch) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_tiles(job)) {
      for (int64_t position = begin / 16 * 16; position < end; position += 16)
        scores_tiles(job.slot(job.key_cache, job.key_size, pages, position, head),
                     int64_t(sizeof(T)) * job.num_heads * job.key_size, scratch.pairs.data(), job.key_size,
                     scratch.scores[position - origin]);
      return;
    }
  }
#endif
  constexpr int kKeys = 4;
  for (int64_t position = begin; position < end; position += kKeys) {
    const T* keys[kKeys];
    for (int i = 0; i < kKeys; ++i)
      keys[i] = job.slot(job.key_cache, job.key_size, pages, std::min<int64_t>(position + i, end - 1), head);
    F16 sums[kKeys] = {};
    for (int64_t d = 0; d < job.key_size; ++d) {
      const F16 query = load16(&scratch.query[d * kLanes]);
      for (int i = 0; i < kKeys; ++i) sums[i] += query * to_float(keys[i][d]);
    }
    for (int i = 0; i < kKeys && position + i < end; ++i) store16(scratch.scores[position + i - origin], sums[i]);
  }
}

// Add the chunk's weighted values to sums [16][width]: Q queries, V vectors of 16 at offset d.
template <int V, class T>
inline void add_values(const Attention<T>& job, const int32_t* pages, int64_t head, int64_t origin, int64_t begin,
                       int64_t end, int query, int64_t d, int64_t width, Scratch& scratch) {
  F16 sums[4][V] = {};
  for (int64_t position = begin; position < end; ++position) {
    const T* from = job.slot(job.value_cache, job.value_size, pages, position, head) + d;
    F16 value[V];
    for (int v = 0; v < V; ++v) {
      if (d + (v + 1) * kLanes <= job.value_size) {
        value[v] = load16(from + v * kLanes);
      } else {
        value[v] = F16{};
        for (int64_t i = 0; d + v * kLanes + i < job.value_size; ++i) value[v][i] = to_float(from[v * kLanes + i]);
      }
    }
    const float* weight = &scratch.scores[position - origin][query];
    for (int q = 0; q < 4; ++q)
      for (int v = 0; v < V; ++v) sums[q][v] += value[v] * weight[q];
  }
  for (int q = 0; q < 4; ++q)
    for (int v = 0; v < V; ++v) {
      float* to = &scratch.sums[(query + q) * width + d + v * kLanes];
      store16(to, load16(to) + sums[q][v]);
    }
}

template <class T>
void attend_block(const Attention<T>& job, const Block& block, int64_t head, Scratch& scratch) {
  const int32_t* pages = job.rows.page_ids + job.rows.page_starts[block.segment];
  const int64_t width = (job.value_size + 15) / 16 * 16;
  const bool tiles = use_tiles(job);
  I16 first = {}, last;
  int64_t begin = std::numeric_limits<int64_t>::max(), stop = 0;
  if (tiles) scratch.pairs.assign(job.key_size * kLanes, 0);
  else scratch.query.assign(job.key_size * kLanes, 0.0f);
  scratch.sums.assign(kLanes * width, 0.0f);
  for (int i = 0; i < kLanes; ++i) {
    if (i >= block.num_queries) {  // idle lanes see the same keys as lane 0; nothing reads them
      first[i] = first[0];
      last[i] = last[0];
      continue;
    }
    const int64_t index = block.first_query + i, row = block.first_row + index / job.group;
    const T* query = job.query.at(row, head * job.group + index % job.group);
    last[i] = job.rows.positions[row];
    first[i] = job.window ? std::max<int64_t>(0, last[i] - job.window + 1) : 0;
    begin = std::min<int64_t>(begin, first[i]);
    stop = std::max<int64_t>(stop, last[i] + 1);
    if (tiles) {
      for (int64_t d = 0; d < job.key_size; ++d)
        std::memcpy(&scratch.pairs[d / 2 * 32 + i * 2 + d % 2], query + d, sizeof(uint16_t));
    } else {
      for (int64_t d = 0; d < job.key_size; ++d) scratch.query[d * kLanes + i] = to_float(query[d]);
    }
  }
  const F16 lowest = splat(-1e30f);
  F16 maximum = lowest, total = {};
  for (int64_t origin = begin / kChunk * kChunk; origin < stop; origin += kChunk) {
    const int64_t from = std::max(begin, origin), to = std::min(stop, origin + kChunk);
    chunk_scores(job, pages, head, origin, from, to, scratch);
    F16 top = lowest;
    for (int64_t position = from; position < to; ++position) {
      F16 score = load16(scratch.scores[position - origin]) * job.scale;
      if (job.softcap > 0.0f) score = tanh16(score / job.softcap) * job.softcap;
      const I16 at = I16{} + int32_t(position);
      score = select((at >= first) & (at <= last), score, lowest);
      top = select(score > top, score, top);
      store16(scratch.scores[position - origin], score);
    }
    const F16 raised = select(top > maximum, top, maximum);
    F16 sum = {};
    for (int64_t position = from; position < to; ++position) {
      const F16 score = load16(scratch.scores[position - origin]);
      const F16 weight = select(score > -1e29f, exp16(score - raised), F16{});
      sum += weight;
      store16(scratch.scores[position - origin], weight);
    }
    const F16 fade = exp16(maximum - raised);
    total = total * fade + sum;
    maximum = raised;
    for (int query = 0; query < block.num_queries; query += 4) {
      for (int q = query; q < query + 4; ++q)
        for (int64_t d = 0; d < width; d += kLanes)
          store16(&scratch.sums[q * width + d], load16(&scratch.sums[q * width + d]) * fade[q]);
      int64_t d = 0;
      for (; d + 64 <= width; d += 64) add_values<4>(job, pages, head, origin, from, to, query, d, width, scratch);
      for (; d < width; d += 16) add_values<1>(job, pages, head, origin, from, to, query, d, width, scratch);
    }
  }
  for (int i = 0; i < block.num_queries; ++i) {
    const int64_t index = block.first_query + i;
    T* to = job.out.at(block.first_row + index / job.group, head * job.group + index % job.group);
    for (int64_t d = 0; d < job.value_size; d += kLanes) {
      const F16 result = load16(&scratch.sums[i * width + d]) / total[i];
      if (d + kLanes <= job.value_size) {
        store16(to + d, result);
      } else {
        T tail[kLanes];
        store16(tail, result);
        std::memcpy(to + d, tail, sizeof(T) * (job.value_size - d));
      }
    }
  }
}

template <class T>
void attention(const Attention<T>& job) {
  if (job.key.data) write_rows(job);
  std::vector<Block> blocks;
  for (int64_t row = 0; row < job.rows.num_rows;) {
    const int32_t segment = job.rows.row_segments[row];
    int64_t end = row;
    while (end < job.rows.num_rows && job.rows.row_segments[end] == segment) ++end;
    const int64_t num_queries = (end - row) * job.group;
    for (int64_t query = 0; query < num_queries; query += kLanes)
      blocks.push_back({segment, int32_t(row), int32_t(query), int32_t(std::min<int64_t>(kLanes, num_queries - query))});
    row = end;
  }
  auto body = [&](int task) {
    static thread_local Scratch scratch;
#if defined(__AMX_BF16__)
    if (use_tiles(job)) configure_tiles();
#endif
    attend_block(job, blocks[task / job.num_heads], task % job.num_heads, scratch);
#if defined(__AMX_BF16__)
    if (use_tiles(job)) _tile_release();
#endif
  };
  parallel(int(blocks.size() * job.num_heads), body);
}

}  // namespace foretoken
