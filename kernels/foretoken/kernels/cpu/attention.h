// Paged attention of a flat ragged batch, chains and trees, and the write of its new keys and values.
//
// Sixteen queries (row, head) of one sequence and key head share a pass over the keys: lane i of every vector is query
// i, so no query can change another's bits. Keys are reduced in chunks of 256 absolute positions, in order, in float32.
// Where rows of a tree part ways, each path adds the places that are its own, for its lanes alone.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "attention_tiles.h"
#include "paged_rows.h"
#include "pool.h"
#include "simd.h"

namespace foretoken {

// Up to 16 queries of rows [first_row, ...) of one sequence and one key head.
struct Block {
  int32_t segment, first_row, first_query, num_queries;

  int64_t row(int64_t query, int64_t group) const { return first_row + (first_query + query) / group; }
};

constexpr float kLowest = -1e30f;  // what a lane's scores are where it sees nothing

template <class T>
int64_t padded_width(const Attention<T>& job) {
  return (job.value_size + kLanes - 1) / kLanes * kLanes;
}

// Bring numbers into the cache ahead of their use: the processor's own prefetching ends at every page.
template <class T>
inline void fetch(const T* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

// Whether queries are kept as bf16 pairs, which products of pairs take, on tiles or without.
template <class T>
bool use_pairs(const Attention<T>& job) {
  return use_tiles(job) || (has_dots() && sizeof(T) == 2 && job.key_size % 2 == 0);
}

#if defined(__AVX512BF16__)
// Dot products of pairs in 16 lanes, or in 8, which take half the time: a lane is a query.
struct SixteenLanes {
  typedef __m512 Sum;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum sum, const uint16_t* queries, int32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(queries), (__m512bh)_mm512_set1_epi32(pair));
  }
  static void store(float* to, Sum sum) { _mm512_storeu_ps(to, sum); }
};
struct EightLanes {
  typedef __m256 Sum;
  static Sum zero() { return _mm256_setzero_ps(); }
  static Sum add(Sum sum, const uint16_t* queries, int32_t pair) {
    const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(queries));
    return _mm256_dpbf16_ps(sum, (__m256bh)lanes, (__m256bh)_mm256_set1_epi32(pair));
  }
  static void store(float* to, Sum sum) { _mm256_storeu_ps(to, sum); }
};

// Scores of places [begin, end) by dot products of pairs, eight keys at a time; of lanes beyond Vector's, any numbers.
template <class Vector>
void scores_dots(const Attention<bf16>& job, const bf16* keys_of_head, int64_t begin, int64_t end,
                 const Scratch& scratch, float (*scores)[kLanes]) {
  const int64_t slot_size = job.num_heads * job.key_size;
  for (int64_t place = begin; place < end; place += kKeyBlock) {
    const bf16* keys[kKeyBlock];
    typename Vector::Sum sums[kKeyBlock];
#pragma GCC unroll 8
    for (int i = 0; i < kKeyBlock; ++i) {
      keys[i] = keys_of_head + scratch.slots[std::min<int64_t>(place + i, end - 1)] * slot_size;
      sums[i] = Vector::zero();
      fetch(keys_of_head + scratch.slots[std::min<int64_t>(place + 16 + i, end - 1)] * slot_size, job.key_size);
    }
    for (int64_t d = 0; d < job.key_size; d += 2)
#pragma GCC unroll 8
      for (int i = 0; i < kKeyBlock; ++i) {
        int32_t pair;
        std::memcpy(&pair, keys[i] + d, sizeof pair);
        sums[i] = Vector::add(sums[i], &scratch.pairs[d * kLanes], pair);
      }
#pragma GCC unroll 8
    for (int i = 0; i < kKeyBlock; ++i) Vector::store(scores[place + i], sums[i]);  // places from `end` on are spare
  }
}
#endif

// The numbers of a key as floats, at `room` unless they are.
inline const float* as_floats(const float* key, int64_t, float*) { return key; }
inline const float* as_floats(const bf16* key, int64_t size, float* room) {
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store16(room + d, load16(key + d));
  for (; d < size; ++d) room[d] = to_float(key[d]);
  return room;
}

// Scores of places [begin, end) by float vectors, a few keys at a time; of lanes beyond V vectors, any numbers.
template <int V, class T>
void scores_vectors(const T* keys_of_head, int64_t slot_size, int64_t size, int64_t begin, int64_t end,
                    Scratch& scratch, float (*scores)[kLanes]) {
  constexpr int kKeys = kNative == kLanes ? kKeyBlock : 4;  // whose sums stay in registers
  scratch.floats.resize(kKeys * size);
  for (int64_t place = begin; place < end; place += kKeys) {
    const float* keys[kKeys];
    Native sums[kKeys][V];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) {
      const int64_t slot = scratch.slots[std::min<int64_t>(place + i, end - 1)];
      keys[i] = as_floats(keys_of_head + slot * slot_size, size, &scratch.floats[i * size]);
      fetch(keys_of_head + scratch.slots[std::min<int64_t>(place + 16 + i, end - 1)] * slot_size, size);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[i][v] = Native{};
    }
    for (int64_t d = 0; d < size; ++d) {
      Native query[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) query[v] = load_native(&scratch.query[d * kLanes + v * kNative]);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[i][v] += query[v] * keys[i][d];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i)  // places from `end` on are spare
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) store_native(scores[place + i] + v * kNative, sums[i][v]);
  }
}

#if defined(__AVX512F__)
// Rows of sixteen 32-bit numbers become columns.
inline void transpose16(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i low01 = _mm512_unpacklo_epi32(x[i], x[i + 1]), high01 = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    const __m512i low23 = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]), high23 = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
    y[i] = _mm512_unpacklo_epi64(low01, low23);  // columns 0, 4, 8, 12 of rows i to i + 3
    y[i + 1] = _mm512_unpackhi_epi64(low01, low23);
    y[i + 2] = _mm512_unpacklo_epi64(high01, high23);
    y[i + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}

// Scores of the first 4 * Fours queries at places [begin, end), with sixteen keys as lanes: where most lanes of queries
// would be idle. The sums are those of scores_vectors, in the same order. Keys are whole vectors long.
template <int Fours, class T>
void scores_keys(const T* keys_of_head, int64_t slot_size, int64_t size, int64_t begin, int64_t end,
                 const Scratch& scratch, float (*scores)[kLanes]) {
  constexpr int kQueries = 4 * Fours, kNumbers = 64 / sizeof(T);
  const auto key_at = [&](int64_t place) { return keys_of_head + scratch.slots[std::min(place, end - 1)] * slot_size; };
  for (int64_t place = begin; place < end; place += 16) {
    __m512 sums[kQueries];
#pragma GCC unroll 8
    for (int q = 0; q < kQueries; ++q) sums[q] = _mm512_setzero_ps();
    for (int64_t d = 0; d < size; d += kNumbers) {
      __m512i keys[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        keys[i] = _mm512_loadu_si512(key_at(place + i) + d);
        __builtin_prefetch(key_at(place + 48 + i) + d);  // one round ahead is less than a fetch takes
      }
      transpose16(keys);
      const float* query = &scratch.query[d * kLanes];
      const auto add = [&](__m512i key) {
#pragma GCC unroll 8
        for (int q = 0; q < kQueries; ++q) sums[q] = _mm512_fmadd_ps(_mm512_set1_ps(query[q]), (__m512)key, sums[q]);
        query += kLanes;
      };
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        if constexpr (sizeof(T) == 2) {
          add(_mm512_slli_epi32(keys[i], 16));
          add(_mm512_and_si512(keys[i], _mm512_set1_epi32(int(0xffff0000))));
        } else {
          add(keys[i]);
        }
      }
    }
#pragma GCC unroll 2
    for (int q = 0; q < kQueries; q += 4) {
      const __m512d low01 = (__m512d)_mm512_unpacklo_ps(sums[q], sums[q + 1]);
      const __m512d high01 = (__m512d)_mm512_unpackhi_ps(sums[q], sums[q + 1]);
      const __m512d low23 = (__m512d)_mm512_unpacklo_ps(sums[q + 2], sums[q + 3]);
      const __m512d high23 = (__m512d)_mm512_unpackhi_ps(sums[q + 2], sums[q + 3]);
      const __m512 rows[4] = {(__m512)_mm512_unpacklo_pd(low01, low23), (__m512)_mm512_unpackhi_pd(low01, low23),
                              (__m512)_mm512_unpacklo_pd(high01, high23), (__m512)_mm512_unpackhi_pd(high01, high23)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // places from `end` on are spare
        _mm_storeu_ps(scores[place + i] + q, _mm512_castps512_ps128(rows[i]));
        _mm_storeu_ps(scores[place + 4 + i] + q, _mm512_extractf32x4_ps(rows[i], 1));
        _mm_storeu_ps(scores[place + 8 + i] + q, _mm512_extractf32x4_ps(rows[i], 2));
        _mm_storeu_ps(scores[place + 12 + i] + q, _mm512_extractf32x4_ps(rows[i], 3));
      }
    }
  }
}
#endif

// Scores of places [begin, end) of a chunk; raw products, neither scaled nor masked.
template <class T>
void chunk_scores(const Attention<T>& job, const Block& block, int64_t head, int64_t begin, int64_t end,
                  Scratch& scratch, float (*scores)[kLanes]) {
  const T* keys_of_head = job.key_cache + head * job.key_size;
  const int64_t slot_size = job.num_heads * job.key_size;
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_tiles(job)) {
      for (int64_t place = begin; place < end; place += 16)
        scores_tiles(find_keys(keys_of_head, slot_size, job.key_size, place, end, scratch), scratch.pairs.data(),
                     job.key_size, scores[place]);
      return;
    }
  }
#endif
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_pairs(job) && block.num_queries <= 8)
      return scores_dots<EightLanes>(job, keys_of_head, begin, end, scratch, scores);
    if (use_pairs(job)) return scores_dots<SixteenLanes>(job, keys_of_head, begin, end, scratch, scores);
  }
#endif
#if defined(__AVX512F__)
  if (block.num_queries <= 8 && job.key_size * sizeof(T) % 64 == 0) {
    const auto some = block.num_queries <= 4 ? scores_keys<1, T> : scores_keys<2, T>;
    return some(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
  }
#endif
  // The first eight lanes alone, if the others are idle and a vector is no wider.
  if (kNative <= 8 && block.num_queries <= 8)
    return scores_vectors<8 / std::min(kNative, 8)>(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
  return scores_vectors<kParts>(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
}

// Add the weighted values of places [begin, end) to parts [16][width]: Q queries, V vectors at offset d. Inlined, its
// sums would not stay in registers.
template <int Q, int V, class T>
[[gnu::noinline]] void add_values(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, int query, int64_t d,
                                  int64_t width, const float (*weights)[kLanes], Scratch& scratch) {
  const T* values = job.value_cache + head * job.value_size + d;
  const int64_t slot_size = job.num_heads * job.value_size;
  const bool whole = V > 1 || d + kNative <= job.value_size;
  Native sums[Q][V];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[q][v] = load_native(&scratch.parts[(query + q) * width + d + v * kNative]);
  for (int64_t place = begin; place < end; ++place) {
    const T* from = values + scratch.slots[place] * slot_size;
    if (query == 0) fetch(values + scratch.slots[std::min(place + 12, end - 1)] * slot_size, V * kNative);
    Native value[V];
    if (whole) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) value[v] = load_native(from + v * kNative);
    } else {
      value[0] = Native{};
      for (int64_t i = 0; d + i < job.value_size; ++i) value[0][i] = to_float(from[i]);
    }
    const float* weight = &weights[place][query];
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[q][v] += value[v] * weight[q];
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store_native(&scratch.parts[(query + q) * width + d + v * kNative], sums[q][v]);
}

// The same for all dimensions of the queries [first, stop).
template <class T>
void add_values(const Attention<T>& job, int64_t head, int64_t begin, int64_t end, int first, int stop,
                const float (*weights)[kLanes], Scratch& scratch) {
  constexpr int kVectors = kNative == kLanes ? 4 : 2;  // whose sums stay in registers
  const int64_t width = padded_width(job);
  for (int query = first / 4 * 4; query < stop; query += 4) {
    int64_t d = 0;
    for (; d + kVectors * kNative <= job.value_size; d += kVectors * kNative)
      add_values<4, kVectors>(job, head, begin, end, query, d, width, weights, scratch);
    for (; d < job.value_size; d += kNative) add_values<4, 1>(job, head, begin, end, query, d, width, weights, scratch);
  }
}

// The queries of a block: which positions each sees, and its softmax so far.
struct Lanes {
  I16 first, last;  // positions; an idle lane is a copy of lane 0, which nothing reads
  F16 maximum = splat(kLowest), total = {};
  int64_t begin = std::numeric_limits<int64_t>::max(), stop = 0;  // positions that any of them sees
  int64_t fork = std::numeric_limits<int64_t>::max();             // before it all find their keys in the same slots
};

template <class T>
Lanes load_queries(const Attention<T>& job, const Block& block, int64_t head, Scratch& scratch) {
  Lanes lanes;
  const bool pairs = use_pairs(job);
  if (pairs) scratch.pairs.assign(job.key_size * kLanes, 0);
  else scratch.query.assign(job.key_size * kLanes, 0.0f);
  for (int i = 0; i < kLanes; ++i) {
    if (i >= block.num_queries) {
      lanes.first.set(i, lanes.first[0]);
      lanes.last.set(i, lanes.last[0]);
      continue;
    }
    const int64_t row = block.row(i, job.group);
    const T* query = job.query.at(row, head * job.group + (block.first_query + i) % job.group);
    lanes.last.set(i, job.rows.positions[row]);
    lanes.first.set(i, job.window ? std::max<int64_t>(0, lanes.last[i] - job.window + 1) : 0);
    lanes.begin = std::min<int64_t>(lanes.begin, lanes.first[i]);
    lanes.stop = std::max<int64_t>(lanes.stop, lanes.last[i] + 1);
    if (job.rows.path_length(row)) lanes.fork = std::min(lanes.fork, job.rows.fork(row));
    if (pairs) {
      for (int64_t d = 0; d < job.key_size; d += 2)
        std::memcpy(&scratch.pairs[d / 2 * 32 + i * 2], query + d, sizeof(uint32_t));
    } else {
      for (int64_t d = 0; d < job.key_size; ++d) scratch.query[d * kLanes + i] = to_float(query[d]);
    }
  }
  return lanes;
}

// Raise the lanes' maxima to `raised` and add `sum`, of weights taken with it, to their totals.
template <class T>
void raise_maximum(const Attention<T>& job, const Block& block, F16 raised, F16 sum, Lanes& lanes, Scratch& scratch) {
  const int64_t width = padded_width(job);
  const F16 fade = exp16(lanes.maximum - raised);  // exactly 1 for a lane whose maximum stays
  lanes.total = lanes.total * fade + sum;
  lanes.maximum = raised;
  for (int query = 0; query < block.num_queries; ++query)
    for (int64_t d = 0; d < width; d += kLanes)
      store16(&scratch.sums[query * width + d], load16(&scratch.sums[query * width + d]) * fade[query]);
}

// Make weights of the scores of places [from, to) of the chunk at `origin`, for lanes that see a key up to `last`.
template <class T>
void weigh(const Attention<T>& job, const Block& block, int64_t origin, int64_t from, int64_t to, I16 last, Lanes& lanes,
           Scratch& scratch) {
  const F16 lowest = splat(kLowest);
  F16 top = lowest;
  for (int64_t place = from; place < to; ++place) {
    F16 score = load16(scratch.scores[place]) * job.scale;
    if (job.softcap > 0.0f) score = tanh16(score / job.softcap) * job.softcap;
    const I16 at = splat(int32_t(origin + place));
    score = select((at >= lanes.first) & (at <= last), score, lowest);
    top = select(score > top, score, top);
    store16(scratch.scores[place], score);
  }
  const F16 raised = select(top > lanes.maximum, top, lanes.maximum);
  F16 sum = {};
  for (int64_t place = from; place < to; ++place) {
    const F16 score = load16(scratch.scores[place]);
    const F16 weight = select(score < -1e29f, F16{}, exp16(score - raised));  // NaN, seen, makes NaN
    sum += weight;
    store16(scratch.scores[place], weight);
  }
  raise_maximum(job, block, raised, sum, lanes, scratch);
}

// After the last chunk: each lane's sink, a key without a value.
template <class T>
void add_sinks(const Attention<T>& job, const Block& block, int64_t head, Lanes& lanes, Scratch& scratch) {
  F16 sinks = lanes.maximum;
  for (int i = 0; i < block.num_queries; ++i)
    sinks.set(i, job.sinks[head * job.group + (block.first_query + i) % job.group]);
  const F16 raised = select(sinks > lanes.maximum, sinks, lanes.maximum);
  raise_maximum(job, block, raised, exp16(sinks - raised), lanes, scratch);
}

// Close a chunk: its weighted values join the sums.
inline void add_parts(Scratch& scratch) {
  for (size_t i = 0; i < scratch.sums.size(); i += kLanes)
    store16(&scratch.sums[i], load16(&scratch.sums[i]) + load16(&scratch.parts[i]));
}

// Add places [from, to) of the chunk at `origin`, whose slots scratch holds, for lanes that see a key up to `last`.
template <class T>
void reduce_chunk(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, int64_t from, int64_t to,
                  I16 last, Lanes& lanes, Scratch& scratch) {
  chunk_scores(job, block, head, from / 16 * 16, to, scratch, scratch.scores);
  weigh(job, block, origin, from, to, last, lanes, scratch);
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    if (use_tiles(job)) {
      add_values_tiles(job.value_cache + head * job.value_size, job.num_heads * job.value_size, job.value_size, from, to,
                       scratch);
      return;
    }
  }
#endif
  scratch.parts.assign(scratch.sums.size(), 0.0f);
  add_values(job, head, from, to, 0, block.num_queries, scratch.scores, scratch);
  add_parts(scratch);
}

// Lanes whose keys lie in the same slots.
struct Path {
  int64_t row = -1;              // the tree's row; -1: all rows whose keys lie in order
  int first = kLanes, stop = 0;  // its lanes are among [first, stop)
  I16 last = splat(-1);          // the position of each of its lanes, -1 for the others
  int64_t end = 0;               // the positions they see end before it
};

// visit(path) for the rows in order together, then for each other row of the block by itself.
template <class T, class Visit>
void for_each_path(const Attention<T>& job, const Block& block, const Lanes& lanes, Visit visit) {
  const int64_t begin_row = block.row(0, job.group), end_row = block.row(block.num_queries - 1, job.group) + 1;
  for (int64_t row = begin_row - 1; row < end_row; ++row) {
    Path path;
    if (row >= begin_row) {
      if (!job.rows.path_length(row)) continue;
      path.row = row;
    }
    for (int i = 0; i < block.num_queries; ++i) {
      const int64_t own = block.row(i, job.group);
      if (path.row < 0 ? job.rows.path_length(own) > 0 : own != path.row) continue;
      path.first = std::min(path.first, i);
      path.stop = i + 1;
      path.last.set(i, lanes.last[i]);
      path.end = std::max<int64_t>(path.end, lanes.last[i] + 1);
    }
    if (path.stop) visit(path);
  }
}

template <class T>
void find_slots_of(const Attention<T>& job, const Block& block, const Path& path, int64_t begin, int64_t end,
                   int64_t* slots) {
  const int32_t* pages = job.pages(block.segment);
  if (path.row < 0) find_slots(job, pages, begin, end, slots);
  else find_path_slots(job, pages, path.row, begin, end, slots);
}

#if defined(__AMX_BF16__)
// A chunk in which rows of the block part ways, on tiles: the whole of it for each path, with the other lanes blind.
template <class T>
void reduce_forked_tiles(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, Lanes& lanes,
                         Scratch& scratch) {
  const int64_t from = std::max(lanes.begin, origin) - origin, aligned = from / 16 * 16;
  for_each_path(job, block, lanes, [&](const Path& path) {
    const int64_t to = std::min(path.end, origin + kChunk) - origin;
    if (to <= from) return;
    find_slots_of(job, block, path, origin + aligned, origin + to, scratch.slots + aligned);
    reduce_chunk(job, block, head, origin, from, to, path.last, lanes, scratch);
  });
}
#endif

// A chunk in which rows of the block part ways at place `fork`: what lies before it is common. Every lane has the sums
// of a chunk that is all its own: its scores are its path's, and values are added in the order of places.
template <class T>
void reduce_forked_chunk(const Attention<T>& job, const Block& block, int64_t head, int64_t origin, Lanes& lanes,
                         Scratch& scratch) {
#if defined(__AMX_BF16__)
  if (use_tiles(job)) return reduce_forked_tiles(job, block, head, origin, lanes, scratch);
#endif
  const int64_t from = std::max(lanes.begin, origin) - origin, to = std::min(lanes.stop, origin + kChunk) - origin;
  const int64_t fork = std::clamp(lanes.fork - origin, from, to);
  find_slots(job, job.pages(block.segment), origin + from, origin + fork, scratch.slots + from);
  chunk_scores(job, block, head, from, fork, scratch, scratch.scores);
  const auto with_own_places = [&](auto visit) {
    for_each_path(job, block, lanes, [&](const Path& path) {
      const int64_t end = std::min(path.end, origin + kChunk) - origin;
      if (end <= fork) return;
      find_slots_of(job, block, path, origin + fork, origin + end, scratch.slots + fork);
      visit(path, end);
    });
  };
  with_own_places([&](const Path& path, int64_t end) {
    chunk_scores(job, block, head, fork, end, scratch, scratch.branch);
    for (int64_t place = fork; place < end; ++place)
      store16(scratch.scores[place],
              select(path.last >= 0, load16(scratch.branch[place]), load16(scratch.scores[place])));
  });
  weigh(job, block, origin, from, to, lanes.last, lanes, scratch);
  scratch.parts.assign(scratch.sums.size(), 0.0f);
  add_values(job, head, from, fork, 0, block.num_queries, scratch.scores, scratch);
  with_own_places([&](const Path& path, int64_t end) {
    for (int64_t place = fork; place < end; ++place)
      store16(scratch.branch[place], select(path.last >= 0, load16(scratch.scores[place]), F16{}));
    add_values(job, head, fork, end, path.first, path.stop, scratch.branch, scratch);
  });
  add_parts(scratch);
}

template <class T>
void write_results(const Attention<T>& job, const Block& block, int64_t head, const Lanes& lanes, Scratch& scratch) {
  const int64_t width = padded_width(job);
  for (int i = 0; i < block.num_queries; ++i) {
    T* to = job.out.at(block.row(i, job.group), head * job.group + (block.first_query + i) % job.group);
    for (int64_t d = 0; d < job.value_size; d += kLanes) {
      const F16 result = load16(&scratch.sums[i * width + d]) / lanes.total[i];
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
void attend_block(const Attention<T>& job, const Block& block, int64_t head, Scratch& scratch) {
  const int32_t* pages = job.pages(block.segment);
  scratch.sums.assign(kLanes * padded_width(job), 0.0f);
  Lanes lanes = load_queries(job, block, head, scratch);
  for (int64_t origin = lanes.begin / kChunk * kChunk; origin < lanes.stop; origin += kChunk) {
    if (lanes.fork < origin + kChunk) {
      reduce_forked_chunk(job, block, head, origin, lanes, scratch);
      continue;
    }
    const int64_t from = std::max(lanes.begin, origin) - origin, to = std::min(lanes.stop, origin + kChunk) - origin;
    const int64_t aligned = from / 16 * 16;  // tiles take 16 slots at a time
    find_slots(job, pages, origin + aligned, origin + to, scratch.slots + aligned);
    reduce_chunk(job, block, head, origin, from, to, lanes.last, lanes, scratch);
  }
  if (job.sinks) add_sinks(job, block, head, lanes, scratch);
  write_results(job, block, head, lanes, scratch);
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
