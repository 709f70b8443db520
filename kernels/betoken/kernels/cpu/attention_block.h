// A block of queries that attend together, and the memory it works in.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "paged_rows.h"
#include "simd.h"

namespace betoken {

constexpr int kChunk = 256;
constexpr int kKeyBlock = 8;       // keys whose scores are made side by side
constexpr int kSpare = 16;         // places after the last that scores may be written to
constexpr float kLowest = -1e30f;  // a lane's score for masked keys

// Up to 16 queries of rows [first_row, ...) of one sequence and one key head.
struct Block {
  int32_t segment, first_row, first_query, num_queries;

  int64_t row(int64_t query, int64_t group) const { return first_row + (first_query + query) / group; }
};

template <class T>
int64_t padded_width(const Attention<T>& job) {
  return (job.value_size + kLanes - 1) / kLanes * kLanes;
}

// The queries of a block: which positions each sees, and its softmax so far.
struct Lanes {
  I16 first, last;  // positions; an idle lane is a copy of lane 0, which nothing reads
  F16 slope = {};  // what a score gains with every position its key is nearer
  F16 maximum = splat(kLowest), total = {};
  int64_t begin = std::numeric_limits<int64_t>::max(), stop = 0;  // positions that any of them sees
  int64_t fork = std::numeric_limits<int64_t>::max();             // before it all find their keys in the same slots
};

// Per-thread memory of one block.
struct Scratch {
  std::vector<float> query;     // [key_size][16]
  std::vector<uint16_t> pairs;  // the same for tiles: [key_size / 2][16][2] bf16
  std::vector<float> floats;    // a few keys
  std::vector<float> sums;      // [16][value_size rounded up]
  std::vector<bf16> keys;       // a run of 16 scattered keys: [16][key_size]
  std::vector<float> parts;     // the same of one chunk
  int64_t slots[kChunk];        // of the chunk's positions
  alignas(64) float scores[kChunk + kSpare][kLanes];
  alignas(64) float packed[(kChunk + 2) * 8];                // scores of a few lanes, several places a vector
  alignas(64) float branch[kChunk + kSpare][kLanes];         // scores, then weights, of the lanes of one path
  alignas(64) uint16_t weights[2][kChunk / 32][kLanes][32];  // tiles of the weights: bf16, and what bf16 left over
  alignas(64) uint16_t values[4][16][32];                    // tiles of 32 values x 64 dimensions, keys paired
  alignas(64) float products[kLanes][64];
};

// Bring numbers into the cache ahead of their use: the processor's own prefetching ends at every page.
template <class T>
inline void fetch(const T* from, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / sizeof(T)) __builtin_prefetch(from + i);
}

}  // namespace betoken
