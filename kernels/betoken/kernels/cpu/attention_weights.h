// From scores to weights: the softmax of a block, a chunk at a time.
#pragma once
#include "attention_block.h"

namespace betoken {

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

// Which keys the lanes of a vector see, and how a score falls with their distance.
struct Sight {
  I16 first, last, position;
  F16 slope;
};

// A score as the softmax takes it: scaled, capped, lower with distance, and lowest where its lane does not see the key.
template <class T>
[[gnu::always_inline]] inline F16 masked_score(const Attention<T>& job, F16 score, const I16& at, const Sight& sight) {
  score = score * job.scale;
  if (job.softcap > 0.0f) score = tanh16(score / job.softcap) * job.softcap;
  if (job.slopes) {
    const F16 distance = by_parts<F16>(
        [](NativeInts x, NativeInts y) { return __builtin_convertvector(x - y, Native); }, at, sight.position);
    score = score + sight.slope * distance;
  }
  return select((at >= sight.first) & (at <= sight.last), score, splat(kLowest));
}

[[gnu::always_inline]] inline F16 weight_of(F16 score, F16 maximum) {
  return select(score < -1e29f, F16{}, exp16(score - maximum));  // NaN, seen, makes NaN
}

[[gnu::always_inline]] inline F16 larger(F16 a, F16 b) { return select(a > b, a, b); }

#if defined(__AVX512DQ__)
// A vector shared by 16 / W places: the first W lanes of each, one place after another.
template <int W>
struct SharedVector {
  static constexpr int kPlaces = kLanes / W;

  static F16 gather(const float (*scores)[kLanes]) {
    if constexpr (W == 8) {
      const __m512 first = _mm512_castps256_ps512(_mm256_load_ps(scores[0]));
      return from(_mm512_insertf32x8(first, _mm256_load_ps(scores[1]), 1));
    } else {
      __m512 x = _mm512_castps128_ps512(_mm_load_ps(scores[0]));
      x = _mm512_insertf32x4(x, _mm_load_ps(scores[1]), 1);
      x = _mm512_insertf32x4(x, _mm_load_ps(scores[2]), 2);
      return from(_mm512_insertf32x4(x, _mm_load_ps(scores[3]), 3));
    }
  }
  // The first place's lanes for every place.
  template <class Vector>
  static Vector repeat(const Vector& x) {
    constexpr int kOrder = W == 8 ? 0x44 : 0;
    return Vector{{(decltype(+x.parts[0]))_mm512_shuffle_i32x4((__m512i)x.parts[0], (__m512i)x.parts[0], kOrder)}};
  }
  // Each lane's largest of all places, for every place.
  static F16 largest(F16 x) {
    x = larger(x, from(_mm512_shuffle_f32x4((__m512)x.parts[0], (__m512)x.parts[0], 0x4e)));
    return W == 8 ? x : larger(x, from(_mm512_shuffle_f32x4((__m512)x.parts[0], (__m512)x.parts[0], 0xb1)));
  }
  // Put the lanes where `gather` takes them from and add them to `sum`, in the order of places.
  static void scatter_and_add(const F16& x, float (*scores)[kLanes], F16& sum) {
    const __m512 all = (__m512)x.parts[0];
    if constexpr (W == 8) {
      add(_mm512_castps512_ps256(all), scores[0], sum);
      add(_mm512_extractf32x8_ps(all, 1), scores[1], sum);
    } else {
      add(_mm256_castps128_ps256(_mm512_castps512_ps128(all)), scores[0], sum);
      add(_mm256_castps128_ps256(_mm512_extractf32x4_ps(all, 1)), scores[1], sum);
      add(_mm256_castps128_ps256(_mm512_extractf32x4_ps(all, 2)), scores[2], sum);
      add(_mm256_castps128_ps256(_mm512_extractf32x4_ps(all, 3)), scores[3], sum);
    }
  }

 private:
  static F16 from(__m512 x) { return F16{{(Native)x}}; }
  static void add(__m256 x, float* score, F16& sum) {
    sum = from(_mm512_castps256_ps512(_mm256_add_ps(_mm512_castps512_ps256((__m512)sum.parts[0]), x)));
    if constexpr (W == 8) _mm256_store_ps(score, x);
    else _mm_store_ps(score, _mm256_castps256_ps128(x));
  }
};

// `weigh` for blocks of up to W queries, as many places at a time as fill a vector: the same numbers, summed in the same
// order. Nothing reads what it leaves in the other lanes.
template <int W, class T>
void weigh_few(const Attention<T>& job, const Block& block, int64_t origin, int64_t from, int64_t to, const I16& last,
               Lanes& lanes, Scratch& scratch) {
  constexpr int kPlaces = SharedVector<W>::kPlaces;
  I16 offsets;
  for (int lane = 0; lane < kLanes; ++lane) offsets.set(lane, lane / W);
  const I16 end = splat(int32_t(origin + to - 1)), seen = SharedVector<W>::repeat(last);
  const I16 stop = by_parts<I16>([](NativeInts x, NativeInts y) { return x < y ? x : y; }, seen, end);
  const Sight sight{SharedVector<W>::repeat(lanes.first), stop, SharedVector<W>::repeat(lanes.last),
                    SharedVector<W>::repeat(lanes.slope)};
  F16 top = splat(kLowest);
  float* packed = scratch.packed;
  for (int64_t place = from; place < to; place += kPlaces, packed += kLanes) {
    const I16 start = splat(int32_t(origin + place));
    const I16 at = by_parts<I16>([](NativeInts x, NativeInts y) { return x + y; }, start, offsets);
    const F16 score = masked_score(job, SharedVector<W>::gather(&scratch.scores[place]), at, sight);
    top = larger(score, top);
    store16(packed, score);
  }
  const F16 raised = larger(SharedVector<W>::largest(top), SharedVector<W>::repeat(lanes.maximum));
  F16 sum = {};
  packed = scratch.packed;
  for (int64_t place = from; place < to; place += kPlaces, packed += kLanes)  // places from `to` on are spare, and add 0
    SharedVector<W>::scatter_and_add(weight_of(load16(packed), raised), &scratch.scores[place], sum);
  raise_maximum(job, block, raised, sum, lanes, scratch);
}
#endif

// Make weights of the scores of places [from, to) of the chunk at `origin`, for lanes that see a key up to `last`.
template <class T>
void weigh(const Attention<T>& job, const Block& block, int64_t origin, int64_t from, int64_t to, I16 last, Lanes& lanes,
           Scratch& scratch) {
#if defined(__AVX512DQ__)
  if (block.num_queries <= 4) return weigh_few<4>(job, block, origin, from, to, last, lanes, scratch);
  if (block.num_queries <= 8) return weigh_few<8>(job, block, origin, from, to, last, lanes, scratch);
#endif
  const Sight sight{lanes.first, last, lanes.last, lanes.slope};
  F16 top = splat(kLowest);
  for (int64_t place = from; place < to; ++place) {
    const I16 at = splat(int32_t(origin + place));
    const F16 score = masked_score(job, load16(scratch.scores[place]), at, sight);
    top = larger(score, top);
    store16(scratch.scores[place], score);
  }
  const F16 raised = larger(top, lanes.maximum);
  F16 sum = {};
  for (int64_t place = from; place < to; ++place) {
    const F16 weight = weight_of(load16(scratch.scores[place]), raised);
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
  const F16 raised = larger(sinks, lanes.maximum);
  raise_maximum(job, block, raised, exp16(sinks - raised), lanes, scratch);
}

}  // namespace betoken
