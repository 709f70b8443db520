// Tile registers in plain C++, under the names of AMX's intrinsics, for processors without them.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1

namespace emulated {

struct Config {  // as the processor reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
inline thread_local Config config;
inline thread_local uint8_t tiles[8][16][64];

inline void load_config(const void* from) { std::memcpy(&config, from, sizeof config); }
inline void release() { config = {}; }
inline void zero(int to) { std::memset(tiles[to], 0, sizeof tiles[to]); }
inline void load(int to, const void* from, int64_t stride) {
  zero(to);
  for (int row = 0; row < config.rows[to]; ++row)
    std::memcpy(tiles[to][row], static_cast<const uint8_t*>(from) + row * stride, config.row_bytes[to]);
}
inline void store(int from, void* to, int64_t stride) {
  for (int row = 0; row < config.rows[from]; ++row)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tiles[from][row], config.row_bytes[from]);
}

// Fours of signed bytes of `a` times unsigned ones of `b`, added to the 32-bit numbers of `to` (TDPBSUD). Shapes that the
// processor rejects are zeros.
inline void add_products(int to, int a, int b) {
  const int rows = config.rows[to], columns = config.row_bytes[to] / 4, fours = config.row_bytes[a] / 4;
  if (config.palette != 1 || rows != config.rows[a] || columns != config.row_bytes[b] / 4 || fours != config.rows[b])
    return zero(to);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      int32_t sum;
      std::memcpy(&sum, &tiles[to][row][column * 4], sizeof sum);
      for (int i = 0; i < fours * 4; ++i)
        sum += int32_t(int8_t(tiles[a][row][i])) * int32_t(tiles[b][i / 4][column * 4 + i % 4]);
      std::memcpy(&tiles[to][row][column * 4], &sum, sizeof sum);
    }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_zero emulated::zero
#define _tile_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_dpbsud emulated::add_products
#define BETOKEN_TILES_GRANTED true
