// Products of the queries of a block with keys: by queries as lanes, by keys as lanes, or on tiles.
//
// Whichever it is, the sum of a query and a key is taken in one order.
#pragma once
#include "attention_tiles.h"

namespace betoken {

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

// Joins what sixteen keys have at `d`, 32 bits each, to the sums of Q queries: number after number by multiply-adds.
struct ByNumbers {
  template <class T, int Q>
  static void add(__m512 (&sums)[Q], const Scratch& scratch, int64_t d, __m512i keys) {
    if constexpr (sizeof(T) == 2) {
      add_floats(sums, &scratch.query[d * kLanes], _mm512_slli_epi32(keys, 16));
      add_floats(sums, &scratch.query[(d + 1) * kLanes], _mm512_and_si512(keys, _mm512_set1_epi32(int(0xffff0000))));
    } else {
      add_floats(sums, &scratch.query[d * kLanes], keys);
    }
  }

 private:
  template <int Q>
  static void add_floats(__m512 (&sums)[Q], const float* query, __m512i keys) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) sums[q] = _mm512_fmadd_ps(_mm512_set1_ps(query[q]), (__m512)keys, sums[q]);
  }
};

#if defined(__AVX512BF16__)
// The same for pairs of bf16 by dot products.
struct ByPairs {
  template <class T, int Q>
  static void add(__m512 (&sums)[Q], const Scratch& scratch, int64_t d, __m512i keys) {
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      int32_t pair;
      std::memcpy(&pair, &scratch.pairs[d * kLanes + 2 * q], sizeof pair);
      sums[q] = _mm512_dpbf16_ps(sums[q], (__m512bh)keys, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
};
#endif

// Scores of the first 4 * Fours queries at places [begin, end), with sixteen keys as lanes: where most lanes of queries
// would be idle. Keys are whole vectors long.
template <class Way, int Fours, class T>
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
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) Way::template add<T>(sums, scratch, d + i * kNumbers / 16, keys[i]);
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
    if (use_pairs(job) && block.num_queries <= 4 && job.key_size % 32 == 0)
      return scores_keys<ByPairs, 1>(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
    if (use_pairs(job) && block.num_queries <= 8)
      return scores_dots<EightLanes>(job, keys_of_head, begin, end, scratch, scores);
    if (use_pairs(job)) return scores_dots<SixteenLanes>(job, keys_of_head, begin, end, scratch, scores);
  }
#endif
#if defined(__AVX512F__)
  if (block.num_queries <= 8 && job.key_size * sizeof(T) % 64 == 0) {
    const auto some = block.num_queries <= 4 ? scores_keys<ByNumbers, 1, T> : scores_keys<ByNumbers, 2, T>;
    return some(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
  }
#endif
  // The first eight lanes alone, if the others are idle and a vector has at most eight.
  if (kNative <= 8 && block.num_queries <= 8)
    return scores_vectors<8 / std::min(kNative, 8)>(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
  return scores_vectors<kParts>(keys_of_head, slot_size, job.key_size, begin, end, scratch, scores);
}

}  // namespace betoken
