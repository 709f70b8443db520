// Products of the attention on tile registers.
#pragma once
#include "attention_block.h"

namespace betoken {

#if defined(__AMX_BF16__)
// Sixteen keys of one head, `stride` elements apart.
struct KeyRun {
  const bf16* keys;
  int64_t stride;
};

// The keys of places [place, place + 16): read in place if they are contiguous, else gathered. Keys at and after
// `end` are any finite ones.
inline KeyRun find_keys(const bf16* keys, int64_t slot_size, int64_t key_size, int64_t place, int64_t end,
                        Scratch& scratch) {
  const int64_t* slots = scratch.slots + place;
  const int64_t last = std::min<int64_t>(15, end - 1 - place);
  if (slots[0] % 16 == 0 && slots[last] == slots[0] + last) return {keys + slots[0] * slot_size, slot_size};
  scratch.keys.resize(16 * key_size);
  for (int64_t i = 0; i < 16; ++i)
    std::memcpy(&scratch.keys[i * key_size], keys + slots[std::min(i, last)] * slot_size, sizeof(bf16) * key_size);
  return {scratch.keys.data(), key_size};
}

// scores[16 keys][16 queries] of one run of 16 keys.
inline void scores_tiles(KeyRun run, const uint16_t* pairs, int64_t size, float* scores) {
  _tile_zero(0);
  for (int64_t d = 0; d < size; d += 32) {
    _tile_loadd(1, run.keys + d, int(sizeof(bf16) * run.stride));
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
  constexpr NativeInts kLow[4] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                           {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                           {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                           {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
  for (int stage = 0; stage < 4; ++stage) {
    const int step = 1 << stage;
    const NativeInts low = kLow[stage], high = low + step;
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const Native a = rows[i].parts[0], b = rows[i + step].parts[0];
      rows[i].parts[0] = (Native)_mm512_permutex2var_ps((__m512)a, (__m512i)low, (__m512)b);
      rows[i + step].parts[0] = (Native)_mm512_permutex2var_ps((__m512)a, (__m512i)high, (__m512)b);
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
      const __m512i first = _mm512_permutex2var_epi16((__m512i)rows[0], (__m512i)kFirst, (__m512i)rows[1]);
      const __m512i second =
          _mm512_permutex2var_epi16((__m512i)rows[0], (__m512i)(kFirst + uint16_t(16)), (__m512i)rows[1]);
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

}  // namespace betoken
