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

  int64_t slot(const int32_t* pages, int64_t position) const {
    return int64_t(pages[position / page_size]) * page_size + position % page_size;
  }
};

template <class T>
void write_rows(const Attention<T>& job) {
  for (int64_t row = 0; row < job.rows.num_rows; ++row) {
    const int32_t* pages = job.rows.page_ids + job.rows.page_starts[job.rows.row_segments[row]];
    const int64_t position = job.rows.positions[row];
    const int64_t first = job.slot(pages, position) * job.num_heads;
    T* key = job.key_cache + first * job.key_size;
    T* value = job.value_cache + first * job.value_size;
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
  std::vector<float> query;     // [key_size][16]
  std::vector<uint16_t> pairs;  // the same for tiles: [key_size / 2][16][2] bf16
  std::vector<float> sums;      // [16][value_size rounded up]
  int64_t slots[kChunk];        // of the chunk's positions
  alignas(64) float scores[kChunk][kLanes];
  alignas(64) uint16_t weights[2][kChunk / 32][kLanes][32];  // tiles of the weights: bf16, and what bf16 left over
  alignas(64) uint16_t values[4][16][32];                    // tiles of 32 values x 64 dimensions, keys paired
  alignas(64) float products[kLanes][64];
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
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  _tile_loadconfig(&config);
}

// rows[i][j] <-> rows[j][i]
inline void transpose16(F16 (&rows)[16]) {
  constexpr I16 kLow[4] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                           {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                           {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                           {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
  for (int stage = 0; stage < 4; ++stage) {
    const int step = 1 << stage;
    const I16 low = kLow[stage], high = low + step;
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const F16 a = rows[i], b = rows[i + step];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + step] = __builtin_shuffle(a, b, high);
    }
  }
}

// scores [keys][queries] of `num_runs` runs of 16 keys -> tiles [queries][32 keys] of bf16 and of what bf16 left over,
// so that a weight keeps 16 bits.
inline void weights_to_tiles(Scratch& scratch, int64_t first_run, int64_t num_runs) {
  for (int64_t run = first_run; run < num_runs; ++run) {
    F16 rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = load16(scratch.scores[run * 16 + i]);
    transpose16(rows);
    for (int query = 0; query < 16; ++query) {
      bf16* high = reinterpret_cast<bf16*>(&scratch.weights[0][run / 2][query][run % 2 * 16]);
      bf16* low = reinterpret_cast<bf16*>(&scratch.weights[1][run / 2][query][run % 2 * 16]);
      store16(high, rows[query]);
      store16(low, rows[query] - load16(high));
    }
  }
}

typedef uint16_t H32 __attribute__((vector_size(64)));

// Tiles [16 pairs of keys][16 dimensions][2] of 32 keys and `width` (32 or 64) dimensions.
inline void values_to_tiles(const bf16* values, int64_t slot_size, const int64_t* slots, int64_t begin, int64_t end,
                            int width, Scratch& scratch) {
  constexpr H32 kFirst = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                          8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  for (int pair = 0; pair < 16; ++pair) {
    for (int d = 0; d < width; d += 32) {
      H32 rows[2] = {};
      for (int i = 0; i < 2; ++i) {
        const int64_t place = pair * 2 + i;
        if (place >= begin && place < end) std::memcpy(&rows[i], values + slots[place] * slot_size + d, sizeof(H32));
      }
      const H32 first = __builtin_shuffle(rows[0], rows[1], kFirst);
      const H32 second = __builtin_shuffle(rows[0], rows[1], kFirst + uint16_t(16));
      std::memcpy(scratch.values[d / 16][pair], &first, sizeof first);
      std::memcpy(scratch.values[d / 16 + 1][pair], &second, sizeof second);
    }
  }
}

// sums [16][size] += weights x values of places [begin, end) of the chunk.
inline void add_values_tiles(const bf16* values, int64_t slot_size, int64_t size, int64_t begin, int64_t end,
                             Scratch& scratch) {
  const int64_t first = begin / 32, stop = (end + 31) / 32;
  for (int64_t place = first * 32; place < begin; ++place) store16(scratch.scores[place], F16{});
  for (int64_t place = end; place < stop * 32; ++place) store16(scratch.scores[place], F16{});
  weights_to_tiles(scratch, first * 2, stop * 2);
  for (int64_t d = 0; d < size; d += 64) {
    const int width = size - d < 64 ? 32 : 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t block = first; block < stop; ++block) {
      values_to_tiles(values + d, slot_size, scratch.slots + block * 32, begin - block * 32, end - block * 32, width,
                      scratch);
      for (int part = 0; part < 2; ++part) {
        _tile_loadd(4, scratch.weights[part][block], 64);
        _tile_loadd(5, scratch.values[0], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, scratch.values[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        if (width == 32) continue;
        _tile_loadd(7, scratch.values[2], 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, scratch.values[3], 64);
        _tile_dpbf16ps(3, 4, 5);
      }
    }
    _tile_stored(0, &scratch.products[0][0], 256);
    _tile_stored(1, &scratch.products[0][16], 256);
    _tile_stored(2, &scratch.products[0][32], 256);
    _tile_stored(3, &scratch.products[0][48], 256);
    for (int query = 0; query < kLanes; ++query)
      for (int i = 0; i < width; i += kLanes) {
        float* to = &scratch.sums[query * size + d + i];
        store16(to, load16(to) + load16(&scratch.products[query][i]));
      }
  }
}
#endif

template <class T>
bool use_tiles(const Attention<T>& job) {
  return sizeof(T) == 2 && has_tiles() && job.page_size % 16 == 0 && job.key_size % 32 == 0 &&
         job.value_size % 32 == 0;
}

// The slots of positions [begin, end) of a chunk; begin is a multiple of 16. No division per position.
template <class T>
void find_slots(const Attention<T>& job, const int32_t* pages, int64_t origin, int64_t begin, int64_t end,
                int64_t* slots) {
  for (int64_t position = begin; position < end;) {
    int64_t slot = job.slot(pages, position);
    const int64_t stop = std::min(end, (position / job.page_size + 1) * job.page_size);
    for (; position < stop; ++position) slots[position - origin] = slot++;
  }
}

// Scores of places [begin, end) of a chunk; raw products, neither scaled nor masked.
template <class T>
void chunk_scores(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, Scratch& scratch) {
  const T* keys_of_head = job.key_cache + head * job.key_size;
  const int64_t slot_size = job.num_heads * job.key_size;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_tiles(job)) {
      for (int64_t place = begin; place < end; place += 16)
        scores_tiles(keys_of_head + scratch.slots[place] * slot_size, int64_t(sizeof(T)) * slot_size,
                     scratch.pairs.data(), job.key_size, scratch.scores[place]);
      return;
    }
  }
#endif
  constexpr int kKeys = 4;
  for (int64_t place = begin; place < end; place += kKeys) {
    const T* keys[kKeys];
    for (int i = 0; i < kKeys; ++i)
      keys[i] = keys_of_head + scratch.slots[std::min<int64_t>(place + i, end - 1)] * slot_size;
    F16 sums[kKeys] = {};
    for (int64_t d = 0; d < job.key_size; ++d) {
      const F16 query = load16(&scratch.query[d * kLanes]);
      for (int i = 0; i < kKeys; ++i) sums[i] += query * to_float(keys[i][d]);
    }
    for (int i = 0; i < kKeys && place + i < end; ++i) store16(scratch.scores[place + i], sums[i]);
  }
}

// Add the weighted values of places [begin, end) to sums [16][width]: 4 queries, V vectors of 16 at offset d.
template <int V, class T>
inline void add_values(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, int query, int64_t d,
                       int64_t width, Scratch& scratch) {
  const T* values = job.value_cache + head * job.value_size + d;
  const int64_t slot_size = job.num_heads * job.value_size;
  F16 sums[4][V] = {};
  for (int64_t place = begin; place < end; ++place) {
    const T* from = values + scratch.slots[place] * slot_size;
    F16 value[V];
    for (int v = 0; v < V; ++v) {
      if (d + (v + 1) * kLanes <= job.value_size) {
        value[v] = load16(from + v * kLanes);
      } else {
        value[v] = F16{};
        for (int64_t i = 0; d + v * kLanes + i < job.value_size; ++i) value[v][i] = to_float(from[v * kLanes + i]);
      }
    }
    const float* weight = &scratch.scores[place][query];
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
      for (int64_t d = 0; d < job.key_size; d += 2)
        std::memcpy(&scratch.pairs[d / 2 * 32 + i * 2], query + d, sizeof(uint32_t));
    } else {
      for (int64_t d = 0; d < job.key_size; ++d) scratch.query[d * kLanes + i] = to_float(query[d]);
    }
  }
  const F16 lowest = splat(-1e30f);
  F16 maximum = lowest, total = {};
  for (int64_t origin = begin / kChunk * kChunk; origin < stop; origin += kChunk) {
    const int64_t from = std::max(begin, origin) - origin, to = std::min(stop, origin + kChunk) - origin;
    const int64_t aligned = from / 16 * 16;  // tiles take 16 slots at a time
    find_slots(job, pages, origin, origin + aligned, origin + to, scratch.slots);
    chunk_scores(job, head, aligned, to, scratch);
    F16 top = lowest;
    for (int64_t place = from; place < to; ++place) {
      F16 score = load16(scratch.scores[place]) * job.scale;
      if (job.softcap > 0.0f) score = tanh16(score / job.softcap) * job.softcap;
      const I16 at = I16{} + int32_t(origin + place);
      score = select((at >= first) & (at <= last), score, lowest);
      top = select(score > top, score, top);
      store16(scratch.scores[place], score);
    }
    const F16 raised = select(top > maximum, top, maximum);
    F16 sum = {};
    for (int64_t place = from; place < to; ++place) {
      const F16 score = load16(scratch.scores[place]);
      const F16 weight = select(score > -1e29f, exp16(score - raised), F16{});
      sum += weight;
      store16(scratch.scores[place], weight);
    }
    const F16 fade = exp16(maximum - raised);
    total = total * fade + sum;
    maximum = raised;
    for (int query = 0; query < block.num_queries; ++query)
      for (int64_t d = 0; d < width; d += kLanes)
        store16(&scratch.sums[query * width + d], load16(&scratch.sums[query * width + d]) * fade[query]);
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
      if (tiles) {
        add_values_tiles(job.value_cache + head * job.value_size, job.num_heads * job.value_size, job.value_size, from,
                         to, scratch);
        continue;
      }
    }
#endif
    for (int query = 0; query < block.num_queries; query += 4) {
      int64_t d = 0;
      for (; d + 64 <= width; d += 64) add_values<4>(job, head, from, to, query, d, width, scratch);
      for (; d < width; d += 16) add_values<1>(job, head, from, to, query, d, width, scratch);
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
